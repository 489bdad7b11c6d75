"""Fakes for tests and benchmarks, of datacache and of its users.

- :func:`datacache.testing.throttled.serve`: a folder behind a server with a given rate, latency and share of
  failing requests, as central storage at a ``throttled://`` URL; also
  ``python -m datacache.testing.throttled_server FOLDER --rate 1gbit --latency-seconds 0.002``.
- :func:`datacache.testing.synthetic.generate`: any number of JPEGs of the size of ImageNet's, as an
  ``ImageFolder`` or as TFRecord files.
"""
