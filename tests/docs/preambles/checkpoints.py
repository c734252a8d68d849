"""What the snippets of docs/checkpoints.md work on: a folder, and in it a small float checkpoint."""

import tempfile
from pathlib import Path

from checkpoints import LLAMA, llama, save

folder = Path(tempfile.mkdtemp())
weights = llama(1)
config = LLAMA
source = save(folder / "source", weights)
