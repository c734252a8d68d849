"""Work on the GPU that is present: the self-test, tuning, timing, and products to check and to time."""
