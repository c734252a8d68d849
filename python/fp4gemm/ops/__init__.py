"""The torch operators, one module for each family: calls, checks, CPU and fake implementations."""
