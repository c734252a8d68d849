"""How the benchmarks measure: the harness, timing, verification, the roofline, and the cases as data."""
