"""The commands of ``cloudtrain``, a file each."""
