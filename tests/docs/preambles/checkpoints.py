"""What the snippets of docs/checkpoints.md read: a small checkpoint with the name of a large one."""

from pathlib import Path

from checkpoints import llama, save

save(Path("Qwen3-8B"), llama(1))
