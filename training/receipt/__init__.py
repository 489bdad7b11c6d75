"""What a run can be proved by: the receipt in its folder, how it is read, and how it is verified."""
