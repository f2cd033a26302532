"""Measurements, printed as tables. Each is run as `python -m benchmarks.NAME` from the root of the repository."""
