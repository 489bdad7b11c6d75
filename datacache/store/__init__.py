"""Records on a node's disk and in its memory: filled by many processes at once, then sealed."""
