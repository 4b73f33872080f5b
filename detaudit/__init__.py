"""Determinism auditing for PyTorch models: which module differs between identical runs, and why."""

__version__ = "0.1.0"
