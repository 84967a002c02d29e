"""The benchmarks: `python -m benchmarks --help`, from a checkout."""
