"""vLLM's whole engine with random weights: its packages in one archive, checkpoints, arms, requests."""
