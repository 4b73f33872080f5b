from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from detaudit.core.records import VariantResult
from detaudit.kernels.backend import Role, Variant
from detaudit.kernels.engines import SWITCHES, autotune_cache_fault, finalize_guidance
from detaudit.kernels.recommend import recommend
from tests.kernels.fakes import FakeBackend, fake_case

BASE = VariantResult(
    name="",
    settings={},
    tactic=None,
    runs=300,
    runs_differing=0,
    distinct=1,
    bound=0.00994,
    max_ulp=0,
    max_abs=0.0,
    rel_error=0.0038,
    median_ms=1.0,
    ratio=1.0,
    can_fuse=False,
)


def chosen(*offers: tuple[str, Role, bool, float | None]) -> str | None:
    """The name recommended among stable variants given as (name, role, can_fuse, median_ms)."""
    variants = [Variant(name, {"name": name}, role, can_fuse) for name, role, can_fuse, _ in offers]
    stable = [
        dataclasses.replace(BASE, name=name, settings={"name": name}, can_fuse=can_fuse, median_ms=ms)
        for name, _, can_fuse, ms in offers
    ]
    found = recommend(FakeBackend([]), fake_case(), variants, stable)
    return None if found is None else found["variant"]


def test_the_fastest_stable_candidate_is_recommended() -> None:
    assert chosen(("slow", "candidate", False, 2.0), ("fast", "candidate", False, 1.0)) == "fast"
    assert chosen(("untimed", "candidate", False, None), ("timed", "candidate", False, 9.0)) == "timed"


def test_what_may_still_fuse_is_never_recommended_however_fast() -> None:
    untuned: tuple[str, Role, bool, float] = ("use_fused_finalize=True, untuned", "candidate", True, 0.5)
    assert chosen(untuned) is None
    assert chosen(untuned, ("unfused", "candidate", False, 1.0)) == "unfused"


def test_pinned_tactics_and_controls_are_never_recommended() -> None:
    assert chosen(("gemm2 45", "listed", False, 0.5)) is None
    assert chosen(("control", "control", False, 0.5)) is None
    assert chosen() is None


def test_a_recommendation_says_where_to_set_it_and_what_it_costs() -> None:
    variants = [Variant("unfused", {"use_fused_finalize": False}, "candidate", can_fuse=False)]
    stable = [dataclasses.replace(BASE, name="unfused", settings=variants[0].settings, ratio=1.0184)]
    assert recommend(FakeBackend([]), fake_case(), variants, stable) == {
        "variant": "unfused",
        "settings": {"use_fused_finalize": False},
        "flashinfer": "kernel(..., unfused)",
        "cost": "1.02 times the median time of the case's own settings",
        "warnings": ["mind the gap"],
    }


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str, text: str) -> None:
    """A package on sys.path that raises when it is imported."""
    file = tmp_path / package / source
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / package / "__init__.py").write_text(
        "raise ImportError('engines are looked into, not imported')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("key", SWITCHES)
def test_a_switch_of_an_installed_engine_is_found_in_its_source(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = SWITCHES[key]
    install(tmp_path, monkeypatch, switch.package, switch.source, f"x = {switch.marker!r}")
    where = finalize_guidance(lambda name: "9.9" if name == switch.distribution else None).where
    assert where[key] == f"{switch.setting} ({switch.distribution} 9.9)"
    assert switch.package not in sys.modules


def test_an_installed_engine_without_the_switch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "vllm", "envs.py", "nothing here")
    where = finalize_guidance(lambda name: "0.33.0" if name == "vllm" else None).where
    assert where["vllm"].startswith("vllm 0.33.0 has no switch")
    assert "#54948" in where["vllm"]


def test_engines_that_are_not_installed_are_named_with_their_switch() -> None:
    guidance = finalize_guidance(lambda name: None)
    assert guidance.where["flashinfer"] == "cutlass_fused_moe(..., use_fused_finalize=False)"
    assert list(guidance.where) == ["flashinfer", "vllm", "sglang", "tensorrt_llm"]
    for key in SWITCHES:
        assert guidance.where[key].startswith("not installed; the switch is ")
    assert guidance.warnings == ()


@pytest.mark.parametrize(
    ("version", "faulty"),
    [
        ("0.6.15", True),
        ("0.6.17", True),
        ("0.6.17.post1", True),
        ("0.6.18", False),
        ("0.6.18rc1", False),
        ("0.7.2.post1", False),
        ("0.7.4", False),
        ("1.0.0", False),
    ],
)
def test_the_autotune_cache_fault_is_warned_of_up_to_0_6_17(version: str, faulty: bool) -> None:
    assert (autotune_cache_fault(version) is not None) == faulty
    warnings = finalize_guidance(lambda name: version if name == "flashinfer-python" else None).warnings
    assert bool(warnings) == faulty
