"""The subcommands of ``python -m bench``, a module each, and what they share: options, the runner of jobs."""
