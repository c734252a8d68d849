"""The tables that upstream's pull requests publish, as jobs: ``python -m bench upstream``."""
