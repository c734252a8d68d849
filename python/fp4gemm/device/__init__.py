"""The GPU that is present: report, self-test, tuning, timing, and products to verify and to time."""
