"""What watches a run: records, early stopping, and writers to other tools, a file each."""
