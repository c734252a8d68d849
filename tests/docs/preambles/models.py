"""The device for the snippets of docs/models.md."""

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
