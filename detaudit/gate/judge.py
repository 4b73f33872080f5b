"""From a report and a policy to checks. Pure; a check passes only on evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from detaudit.core.gating import BaselineResult, Check
from detaudit.core.records import KernelReport, Origin, Report
from detaudit.core.stats import upper_bound
from detaudit.gate.policy import Allowance, Policy, TargetPolicy

UNEXPLAINED = ("unobserved-producer", "observer-effect", "control-flow")
"""Findings that are a difference of their own: allowing the origins does not explain them."""
SAME_ENVIRONMENT = "the environment is the same, so the target's code or what it computes with was changed"
MOST_ENTRIES = 6
"""Changes of the environment that one line lists."""


def judge(report: Report, target: TargetPolicy, policy: Policy) -> Iterator[Check]:
    """Every check that the report alone decides."""
    allowed = [a for a in policy.allowances if a.target in (None, target.name)]
    yield _evidence(report, target.runs)
    if report.verdict != "inconclusive":
        checks = list(_determinism(report, target.name, allowed))
        yield from checks
        if target.bound is not None and all(check.status == "passed" for check in checks):
            yield _bound(report, target.bound)
    yield from _conditions(report, target.conditions)
    yield from _devices(report, target.devices)
    if policy.kernels != "ignore":
        for kernel in report.kernels:
            yield _kernel(kernel, policy.kernels == "confirmed", _allows(allowed, target.name, kernel.module))
        yield from _not_rerun(report, target.name, allowed)


def notes(report: Report, target: TargetPolicy, policy: Policy) -> Iterator[str]:
    """What is worth knowing about a decision and does not change it."""
    for allowance in policy.allowances:
        if allowance.target not in (None, target.name):
            continue
        varying = [o.module for o in report.origins if allowance.covers(target.name, o.module)]
        if varying:
            names = ", ".join(path or "(root)" for path in varying[:4])
            yield f"allowed to vary until {allowance.expires}: {names} ({allowance.reason})"
        elif report.verdict == "deterministic":
            yield f"the allowance for '{allowance.module}' was not needed: nothing that it covers varied"
    if report.origins and all(_allows(policy.allowances, target.name, o.module) for o in report.origins):
        if all(origin.healed for origin in report.origins):
            yield "with the outputs of what may vary held fixed, everything behind it agreed"
        else:
            yield (
                "what lies behind a module that may vary got other inputs in every run, "
                "so nothing was shown about it"
            )


def unknown_modules(
    allowances: Iterable[Allowance], seen: Sequence[tuple[str, Iterable[str]]]
) -> list[Allowance]:
    """Allowances that cover no module of any examined target; ``seen``: (target name, its module paths)."""
    return [
        allowance
        for allowance in allowances
        if not any(allowance.covers(name, path) for name, paths in seen for path in paths)
        and any(allowance.target in (None, name) for name, _ in seen)
    ]


def _evidence(report: Report, wanted: int) -> Check:
    if report.verdict == "inconclusive":
        reason = report.coverage.get("reason") or "nothing was compared"
        return Check("evidence", "inconclusive", f"{reason}, so nothing was shown")
    compared = report.rate.comparisons
    message = f"{_count(report.runs, 'run')}, {_count(compared, 'comparison')}"
    if report.runs < wanted:
        return Check("evidence", "inconclusive", f"{message}; {wanted} runs were asked for")
    return Check("evidence", "passed", message)


def _determinism(report: Report, target: str, allowed: Sequence[Allowance]) -> Iterator[Check]:
    if report.verdict == "deterministic":
        yield Check(
            "determinism", "passed", f"no difference in {_count(report.rate.comparisons, 'comparison')}"
        )
        return
    forbidden = [origin for origin in report.origins if not _allows(allowed, target, origin.module)]
    for origin in forbidden:
        yield Check("determinism", "failed", _origin(origin, report), origin.module)
    found = [f for f in report.findings if f.kind in UNEXPLAINED]
    open_findings = [f for f in found if f.module is None or not _allows(allowed, target, f.module)]
    if report.origins and not forbidden and any(origin.healed is False for origin in report.origins):
        message = "with all outputs that may vary held fixed, something behind them still differs"
        yield Check("determinism", "failed", message)
    elif forbidden:
        return
    elif open_findings:
        for finding in open_findings:
            yield Check("determinism", "failed", f"{finding.kind}: {finding.message}", finding.module)
    elif not report.origins:
        why = "; ".join(f"{finding.kind}: {finding.message}" for finding in report.findings)
        message = "the runs differ, and no module could be named"
        yield Check("determinism", "failed", f"{message} ({why})" if why else message)
    else:
        modules = len({origin.module for origin in report.origins})
        what = "the one module" if modules == 1 else f"the {modules} modules"
        yield Check("determinism", "passed", f"{what} that varied may vary")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _origin(origin: Origin, report: Report) -> str:
    compared = report.rate.comparisons if origin.comparisons is None else origin.comparisons
    of = f" of {compared}" if origin.runs_differing <= compared else ""
    facts = [f"differs in {origin.runs_differing}{of} runs on equal inputs"]
    if origin.max_ulp is not None:
        facts.append(f"by up to {origin.max_ulp:,} ULP")
    if origin.operator:
        facts.append(f"operator {origin.operator}")
    code = " (in its own code)" if origin.part == "own-code" else ""
    return f"{origin.module or '(root)'} ({origin.cls}){code} {', '.join(facts)}"


def _bound(report: Report, bound: float) -> Check:
    """For an allowed variation: the bound on any other difference, with the outputs that vary held fixed.

    As many runs are held so as the audit has (``CapturePass``), and the check is made only where they agree.
    """
    if report.verdict == "deterministic":
        shown = report.rate.high
    elif report.rate.comparisons and any(origin.healed for origin in report.origins):
        shown = upper_bound(report.rate.comparisons)
    else:
        shown = 1.0
    otherwise = "" if report.verdict == "deterministic" else " in any other way"
    what = f"at most {shown:.3g} of runs differ{otherwise} (95%, one-sided)"
    if shown <= bound:
        return Check("bound", "passed", f"{what}; asked for {bound:g}")
    return Check("bound", "inconclusive", f"{what}, and {bound:g} was asked for; more runs are needed")


def _conditions(report: Report, wanted: Sequence[str]) -> Iterator[Check]:
    compared = {c.name for c in report.conditions if c.runs > 1 and c.verdict != "inconclusive"}
    for name in wanted:
        if name in compared:
            yield Check("conditions", "passed", f"{name} was compared")
        else:
            have = ", ".join(sorted(compared)) or "none"
            yield Check(
                "conditions", "inconclusive", f"the condition '{name}' was not compared (compared: {have})"
            )


def _devices(report: Report, wanted: Sequence[str]) -> Iterator[Check]:
    gpus = list((report.environment.get("gpu") or {}).get("devices") or ())
    names = [str(gpu.get("name")) for gpu in gpus]
    have = {"cpu", *(["cuda"] if gpus else []), *(f"sm{gpu.get('sm')}" for gpu in gpus)}
    for device in wanted:
        if device.lower() in have or any(device.lower() in name.lower() for name in names):
            yield Check("devices", "passed", f"{device} is there")
        else:
            found = ", ".join(dict.fromkeys(names)) or "no GPU"
            yield Check("devices", "inconclusive", f"this must be shown on {device}; here is {found}")


def _kernel(kernel: KernelReport, confirmed: bool, allowed: bool) -> Check:
    asked = next((variant for variant in kernel.variants if variant.name == kernel.asked), None)
    module = kernel.module
    if asked is not None and asked.runs_differing and not allowed:
        message = f"kernel {kernel.case}, run alone with the model's settings, differs in "
        message += f"{asked.runs_differing} of {asked.runs} runs"
        return Check("kernels", "failed", message, module)
    message = f"kernel {kernel.case}: {kernel.outcome}, {kernel.outcome_reason}"
    weak = kernel.outcome != "confirmed" if confirmed else kernel.outcome == "vacuous-control"
    return Check("kernels", "inconclusive" if weak and not allowed else "passed", message, module)


def _not_rerun(report: Report, target: str, allowed: Sequence[Allowance]) -> Iterator[Check]:
    """Kernels that did not differ because the racy one did not run, and that no rerun says more about."""
    rerun = {kernel.module for kernel in report.kernels}
    for finding in report.findings:
        known = finding.module in rerun or _allows(allowed, target, finding.module)
        if finding.kind == "fused-not-run" and not known:
            yield Check("kernels", "inconclusive", finding.message, finding.module)


def _allows(allowances: Iterable[Allowance], target: str, module: str | None) -> bool:
    return module is not None and any(a.covers(target, module) for a in allowances)


def baseline_checks(baseline: BaselineResult, policy: Policy) -> Iterator[Check]:
    """What a comparison with the lock file decides."""
    comparison = baseline.comparison
    if comparison == "equal":
        compared = ", ".join(baseline.conditions)
        vary = f", {baseline.calls_varying} vary" if baseline.calls_varying else ""
        message = f"the same bits as the baseline ({compared}: {baseline.calls} calls{vary})"
        yield Check("baseline", "passed", message)
    elif comparison == "changed":
        message = f"stable, but other bits than the baseline; first in {baseline.change}"
        change = baseline.change
        yield Check("baseline", "failed", f"{message}; {SAME_ENVIRONMENT}", change.module if change else None)
    elif comparison == "other-inputs":
        message = "the target's inputs are not those of the baseline, so nothing was compared; "
        yield Check("baseline", "inconclusive", message + "if that is meant, run detaudit gate --update")
    elif policy.unknown_environment == "fail":
        yield Check("baseline", "inconclusive", _no_baseline(baseline))


def no_environment(policy: Policy) -> Iterator[Check]:
    """For a trace whose recording ended before its environment was known."""
    if policy.unknown_environment == "fail":
        yield Check("baseline", "inconclusive", "the environment is not known, so nothing was compared")


def baseline_notes(baseline: BaselineResult, policy: Policy) -> Iterator[str]:
    """What a comparison with the lock file shows beside its check."""
    unknown = baseline.comparison in ("absent", "nothing-stable", "unknown-environment")
    if unknown and policy.unknown_environment == "report":
        yield _no_baseline(baseline)
    if baseline.comparison == "unknown-environment":
        yield _against_the_nearest(baseline)


def _no_baseline(baseline: BaselineResult) -> str:
    if baseline.comparison == "nothing-stable":
        return "no call of this target has stable bits, so there is nothing to compare with the lock file"
    if baseline.comparison == "unknown-environment":
        return f"environment {baseline.environment} is not in the lock file; detaudit gate --update adds it"
    return "the lock file has no baseline for this target; detaudit gate --update takes one"


def _against_the_nearest(baseline: BaselineResult) -> str:
    moved = "; ".join(map(str, baseline.environment_changes[:MOST_ENTRIES]))
    if len(baseline.environment_changes) > MOST_ENTRIES:
        moved += f"; and {len(baseline.environment_changes) - MOST_ENTRIES} more"
    if baseline.bits_equal is None:
        found = "its inputs or conditions are others, so that bits cannot be compared"
    elif baseline.bits_equal:
        found = "the bits are the same"
    else:
        found = f"the bits are others, first in {baseline.change}"
    return f"against the nearest environment, {baseline.against} ({moved}): {found}"
