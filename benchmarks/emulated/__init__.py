"""A cluster of network namespaces on one Linux machine; with the standard library alone."""
