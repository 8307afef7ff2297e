"""STAPO (arXiv 2602.15620) on Lightning: RLVR fine-tuning that silences spurious tokens."""

__version__ = "0.1.0"
