"""``cloudtrain report``: pages about runs, from what they left in their folders. Imports no TensorFlow."""
