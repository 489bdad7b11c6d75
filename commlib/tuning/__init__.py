"""Measure a job's links, kernels and reducers, and choose the fastest reducer from the measurements."""
