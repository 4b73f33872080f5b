"""Which setting to use: the fastest that cannot take the fused finalize, and how to set it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from detaudit.core.records import VariantResult
from detaudit.kernels.backend import Backend, Variant
from detaudit.kernels.cases import Case


def recommend(
    backend: Backend, case: Case, variants: Sequence[Variant], stable: Sequence[VariantResult]
) -> Mapping[str, Any] | None:
    """The recommendation in JSON form, or ``None`` if nothing can be recommended.

    Keys: ``variant``, ``settings``, then one for each library or engine that it can be set in, ``cost``,
    ``warnings``.

    Stable is not enough: an untuned kernel that is allowed to fuse is stable until somebody tunes it. So a
    variant counts only if its runner has no fused tactic under these settings. A pinned tactic (role
    ``listed``) is nothing an engine could set.

    Args:
        stable: candidates that ran to the end without a difference while the control differed.
    """
    eligible = {v.name: v for v in variants if v.role == "candidate" and not v.can_fuse}
    choices = [result for result in stable if result.name in eligible]
    if not choices:
        return None
    best = min(choices, key=lambda result: inf if result.median_ms is None else result.median_ms)
    guidance = backend.guidance(case, eligible[best.name])
    body: dict[str, Any] = {"variant": best.name, "settings": dict(best.settings), **guidance.where}
    if best.ratio is not None:
        body["cost"] = f"{best.ratio:.2f} times the median time of the case's own settings"
    if guidance.warnings:
        body["warnings"] = list(guidance.warnings)
    return body
