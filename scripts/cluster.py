#!/usr/bin/env python3
"""A real cluster on one Linux machine (training/bench/emulated): scripts/cluster.py up, run, status, down."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.bench.emulated.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
