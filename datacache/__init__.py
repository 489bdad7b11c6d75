"""Reading samples once from central storage, then from memory."""
