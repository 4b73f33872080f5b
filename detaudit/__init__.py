"""Determinism auditing for PyTorch models: which module differs between identical runs, and why.

    import detaudit
    report = detaudit.audit(model, (x,), runs=20)
    report.verdict, report.origins

docs/api.md describes what is public. torch is imported only when one of these names is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from detaudit.api import audit as audit
    from detaudit.core.errors import DetauditError as DetauditError
    from detaudit.core.records import Finding as Finding
    from detaudit.core.records import KernelReport as KernelReport
    from detaudit.core.records import Origin as Origin
    from detaudit.core.records import Report as Report

__version__ = "0.1.0"

__all__ = ["DetauditError", "Finding", "KernelReport", "Origin", "Report", "__version__", "audit"]

_HOMES = {
    "audit": "detaudit.api",
    "DetauditError": "detaudit.core.errors",
    "Finding": "detaudit.core.records",
    "KernelReport": "detaudit.core.records",
    "Origin": "detaudit.core.records",
    "Report": "detaudit.core.records",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'detaudit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
