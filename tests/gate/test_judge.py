"""Which report passes which policy: evidence, allowances, bounds, conditions, devices, kernels."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from detaudit.core.gating import Check, worst
from detaudit.core.records import Finding, Report
from detaudit.gate.judge import judge, notes, unknown_modules
from detaudit.gate.policy import Allowance, Policy, TargetPolicy
from tests.golden.reports import deterministic, inconclusive, masked, nondeterministic, unobserved_producer


def allow(*modules: str, target: str | None = None) -> tuple[Allowance, ...]:
    return tuple(Allowance(module, "known", date(2999, 1, 1), target) for module in modules)


def checks(report: Report, *allowances: Allowance, kernels: Any = "ignore", **target: Any) -> list[Check]:
    policy = Policy(None, Path(), allowances=allowances, kernels=kernels)
    return list(judge(report, TargetPolicy("model.py", "model.py", **target), policy))


def statuses(found: list[Check], name: str) -> list[str]:
    return [check.status for check in found if check.name == name]


def test_stable() -> None:
    found = checks(deterministic())
    assert worst(tuple(check.status for check in found)) == "passed"


def test_nothing_at_all_is_no_pass() -> None:
    assert worst(()) == "inconclusive"


def test_inconclusive_is_no_pass_whatever_is_allowed() -> None:
    found = checks(inconclusive(), *allow("*"))
    assert statuses(found, "evidence") == ["inconclusive"]
    assert statuses(found, "determinism") == []


def test_every_origin_that_is_not_allowed_fails() -> None:
    report = nondeterministic()
    assert statuses(checks(report), "determinism") == ["failed", "failed"]
    found = checks(report, *allow("layers.*.experts"))
    assert [(c.status, c.module) for c in found if c.name == "determinism"] == [("failed", "layers.3")]
    other_target = allow("*", target="other.py")
    assert statuses(checks(report, *other_target), "determinism") == ["failed", "failed"]


def test_allowed_origins_pass() -> None:
    found = checks(nondeterministic(), *allow("layers.*.experts", "layers.3"))
    assert statuses(found, "determinism") == ["passed"]


@pytest.mark.parametrize("kind", ["control-flow", "observer-effect", "unobserved-producer"])
def test_a_difference_that_no_origin_explains_fails(kind: Any) -> None:
    report = replace(masked(), findings=(Finding(kind, "head", "it differs"),))
    found = checks(report, *allow("(root)"))
    assert [(c.status, c.module) for c in found if c.name == "determinism"] == [("failed", "head")]
    assert statuses(checks(report, *allow("(root)", "head")), "determinism") == ["passed"]
    assert statuses(checks(unobserved_producer()), "determinism") == ["failed"]


def test_what_still_differs_with_the_allowed_held_fixed_fails() -> None:
    report = masked()
    for healed, status in ((False, "failed"), (True, "passed"), (None, "passed")):
        healed_report = replace(report, origins=(replace(report.origins[0], healed=healed),))
        assert statuses(checks(healed_report, *allow("(root)")), "determinism") == [status]


@pytest.mark.parametrize(("bound", "status"), [(None, []), (0.15, ["passed"]), (0.14, ["inconclusive"])])
def test_bound(bound: float | None, status: list[str]) -> None:
    """19 comparisons carry 1 - 0.05^(1/19) = 0.1459."""
    assert statuses(checks(deterministic(), bound=bound), "bound") == status
    assert statuses(checks(nondeterministic(), *allow("*"), bound=bound), "bound") == status


def test_fewer_runs_than_asked_for() -> None:
    assert statuses(checks(deterministic(), runs=21), "evidence") == ["inconclusive"]
    assert statuses(checks(nondeterministic(), *allow("*"), runs=21), "evidence") == ["inconclusive"]
    assert statuses(checks(deterministic(), runs=20), "evidence") == ["passed"]


def test_conditions() -> None:
    found = checks(deterministic(), conditions=("in-process", "hooks-off", "cuda-graph"))
    assert statuses(found, "conditions") == ["passed", "passed", "inconclusive"]


@pytest.mark.parametrize(
    ("device", "status"),
    [("cpu", "passed"), ("cuda", "passed"), ("SM90", "passed"), ("h200", "passed"), ("B200", "inconclusive")],
)
def test_devices(device: str, status: str) -> None:
    environment = {"gpu": {"devices": [{"name": "NVIDIA H200", "sm": 90}]}}
    report = replace(deterministic(), environment=environment)
    assert statuses(checks(report, devices=(device,)), "devices") == [status]
    without = statuses(checks(deterministic(), devices=(device,)), "devices")
    assert without == ["passed" if device == "cpu" else "inconclusive"]


def test_a_vacuous_control_is_no_pass() -> None:
    report = deterministic()
    assert report.kernels[0].outcome == "vacuous-control"
    assert statuses(checks(report, kernels="shown"), "kernels") == ["inconclusive"]
    assert statuses(checks(report, kernels="ignore"), "kernels") == []
    for outcome, shown, confirmed in [
        ("confirmed", "passed", "passed"),
        ("not-reproduced", "passed", "inconclusive"),
        ("unsupported", "passed", "inconclusive"),
    ]:
        kernel = replace(report.kernels[0], outcome=outcome)  # type: ignore[arg-type]
        one = replace(report, kernels=(kernel,))
        assert statuses(checks(one, kernels="shown"), "kernels") == [shown]
        assert statuses(checks(one, kernels="confirmed"), "kernels") == [confirmed]


def test_a_racy_kernel_that_did_not_run_shows_nothing() -> None:
    finding = Finding("fused-not-run", "layers.0.mlp.experts", "did not differ, because it did not run")
    report = replace(deterministic(), kernels=(), findings=(finding,))
    assert statuses(checks(report, kernels="shown"), "kernels") == ["inconclusive"]
    assert statuses(checks(report, kernels="ignore"), "kernels") == []
    assert statuses(checks(report, *allow("*.experts"), kernels="shown"), "kernels") == []


def test_a_kernel_that_differs_with_the_models_own_settings_fails() -> None:
    """Even where the model's few runs did not show it."""
    (kernel,) = nondeterministic().kernels
    report = replace(deterministic(), kernels=(replace(kernel, asked="fused-tuned"),))
    assert statuses(checks(report, kernels="shown"), "kernels") == ["failed"]
    assert statuses(checks(report, *allow("*.experts"), kernels="shown"), "kernels") == ["passed"]


def test_notes_tell_what_was_used_and_what_was_not_shown() -> None:
    policy = Policy(None, Path(), allowances=allow("layers.*", "never"))
    told = list(notes(nondeterministic(), TargetPolicy("model.py", "model.py"), policy))
    assert told[0].startswith("allowed to vary until 2999-01-01: layers.0.mlp.experts, layers.3 (known)")
    assert "nothing was shown about it" in told[1]
    stable = list(notes(deterministic(), TargetPolicy("model.py", "model.py"), policy))
    assert "the allowance for 'never' was not needed: nothing that it covers varied" in stable


def test_allowances_for_modules_that_do_not_exist() -> None:
    seen = [("a.py", ("", "layers.0")), ("b.py", ("", "head"))]
    given = (*allow("layers.*", "head", "gone"), *allow("head", target="a.py"), *allow("x", target="c.py"))
    assert [(a.module, a.target) for a in unknown_modules(given, seen)] == [("gone", None), ("head", "a.py")]
