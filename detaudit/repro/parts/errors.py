"""What a repro script raises on purpose. These stand in for the classes of ``detaudit.core.errors``."""

from __future__ import annotations


class UsageError(ValueError):
    """An argument that cannot be meant."""


class Unsupported(RuntimeError):
    """This cannot run here; the message says why. The script ends with 3."""
