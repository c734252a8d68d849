"""Benchmarks of fp4gemm: ``python -m bench --help``."""
