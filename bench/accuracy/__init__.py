"""What `python -m bench accuracy` measures: texts, models and their emulation, figures of accuracy."""
