"""The variants of ``cutlass_fused_moe``: finalize, tuning, tactic, graph replay, dependent launch.

Names say what the finalize is allowed to be: ``fused`` is ``use_fused_finalize=True``. Plain data, no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from detaudit.core.records import VariantResult
from detaudit.kernels.backend import Variant
from detaudit.kernels.flashinfer_tactics import UNTUNED as FIRST

UNTUNED, AUTOTUNED = "untuned", "autotuned"
"""``settings["tactics"]``, where it is not the pair of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the runner of a case says about its tactics.

    Args:
        gemm1: how many GEMM1 tactics come first in the list.
        fused, unfused: GEMM2 tactics with ``use_fused_finalize`` and without.
        finalize: a GEMM2 tactic that finalizes in its epilogue, proven; ``None`` if none was found.
    """

    gemm1: int
    fused: tuple[int, ...]
    unfused: tuple[int, ...]
    finalize: int | None

    @property
    def can_fuse(self) -> bool:
        return len(self.fused) > len(self.unfused)


def variants_of(plan: Plan, own: Mapping[str, Any], *, sweep: bool) -> list[Variant]:
    """All variants of a case, the asked one first.

    Args:
        own: the settings of the case's own call.
        sweep: whether every GEMM2 tactic is one, too.
    """
    listed = [*_settable(plan), *_controls(plan), *_circumstances(plan)]
    if sweep:
        listed += _sweep(plan)
    return _with_asked(listed, own, plan)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep over the GEMM2 tactics showed, under one value of ``use_fused_finalize``.

    Args:
        tactics: how many ran to the end.
        differing, finalize: how many of them differed, and how many finalize in their epilogue.
        differing_is_finalize: whether these are the same ones.
        stable_digests: different outputs among the stable ones; 1 if all agree bit for bit.
        failed: names of those that did not run, with the reason.
    """

    tactics: int
    differing: int
    finalize: int
    differing_is_finalize: bool
    stable_digests: int
    failed: Mapping[str, str]


def sweep_of(results: Iterable[VariantResult], *, fused: bool) -> Sweep:
    """Summary of the swept variants among ``results``."""
    prefix = f"{_finalize(fused)}, gemm2 "
    swept = [result for result in results if result.name.startswith(prefix)]
    ran = [result for result in swept if result.reason is None]
    differing = {result.name for result in ran if result.runs_differing}
    finalize = {result.name for result in ran if result.fused}
    return Sweep(
        tactics=len(ran),
        differing=len(differing),
        finalize=len(finalize),
        differing_is_finalize=differing == finalize,
        stable_digests=len({result.digest for result in ran if not result.runs_differing}),
        failed={result.name: result.reason for result in swept if result.reason is not None},
    )


def _finalize(fused: bool) -> str:
    return "fused" if fused else "unfused"


def _settable(plan: Plan) -> Iterator[Variant]:
    """What an engine can set: the argument, and whether to tune."""
    for fused in (True, False):
        name = _finalize(fused)
        for tuning in (UNTUNED, AUTOTUNED):
            settings = {"use_fused_finalize": fused, "tactics": tuning}
            suffix = "" if tuning == UNTUNED else f", {tuning}"
            yield Variant(f"{name}{suffix}", settings, "candidate", can_fuse=fused and plan.can_fuse)


def _controls(plan: Plan) -> Iterator[Variant]:
    if plan.finalize is not None:
        yield Variant("fused, pinned", _pinned(True, plan.finalize), "control", can_fuse=True)


def _circumstances(plan: Plan) -> Iterator[Variant]:
    """Graph replay, and programmatic dependent launch on and off."""
    bases: list[tuple[str, dict[str, Any]]] = [("unfused", {"use_fused_finalize": False, "tactics": UNTUNED})]
    if plan.finalize is not None:
        bases.append(("fused, pinned", _pinned(True, plan.finalize)))
    for name, settings in bases:
        fuses = bool(settings["use_fused_finalize"])
        yield _listed(f"{name}, CUDA graph", settings | {"cuda_graph": True}, fuses)
        for enabled in (True, False):
            yield _listed(
                f"{name}, PDL {'on' if enabled else 'off'}", settings | {"enable_pdl": enabled}, fuses
            )


def _sweep(plan: Plan) -> Iterator[Variant]:
    """Every GEMM2 tactic, under both values of the argument. The ids of the two lists are not comparable."""
    for fused, ids in ((True, plan.fused), (False, plan.unfused)):
        for gemm2 in ids:
            name = f"{_finalize(fused)}, gemm2 {gemm2}"
            yield _listed(name, _pinned(fused, gemm2), fused and plan.can_fuse)


def _pinned(fused: bool, gemm2: int) -> dict[str, Any]:
    return {"use_fused_finalize": fused, "tactics": [FIRST, gemm2]}


def _listed(name: str, settings: Mapping[str, Any], can_fuse: bool) -> Variant:
    return Variant(name, settings, "listed", can_fuse)


def _with_asked(listed: Sequence[Variant], own: Mapping[str, Any], plan: Plan) -> list[Variant]:
    """The case's own settings first: one of the variants if they are the same, else one more."""
    compared = {name: own[name] for name in ("use_fused_finalize", "tactics")}
    same = next((v for v in listed if v.settings == compared and v.role == "candidate"), None)
    if same is None:
        can_fuse = bool(own["use_fused_finalize"]) and plan.can_fuse
        return [Variant("as captured", own, "listed", can_fuse, asked=True), *listed]
    asked = replace(same, asked=True, settings=own)
    return [asked, *(variant for variant in listed if variant is not same)]
