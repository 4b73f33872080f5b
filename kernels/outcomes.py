"""What a comparison of variants has shown: one pure function, and the exit code that follows from it.

A candidate that does not differ proves nothing by itself: the kernel may not have been able to differ at all.
So there is a positive control, a variant that takes the fused finalize and must be able to differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from detaudit.core.errors import EXIT_INCONCLUSIVE, EXIT_NONDETERMINISTIC, EXIT_STABLE
from detaudit.core.records import KernelReport, Outcome, VariantResult
from detaudit.core.stats import CONFIDENCE, fisher_exact


@dataclass(frozen=True, slots=True)
class Decision:
    """``reason``: one sentence. ``control``: the variant that decided. ``stable``: candidates that did not
    differ while the control did so often that it is no chance: what a recommendation may choose from."""

    outcome: Outcome
    reason: str
    control: str | None = None
    stable: tuple[VariantResult, ...] = ()


def decide(
    *,
    controls: Sequence[VariantResult],
    candidates: Sequence[VariantResult],
    asked: VariantResult | None = None,
    cannot_differ: str | None = None,
    unavailable: str | None = None,
) -> Decision:
    """The outcome of one case.

    Args:
        controls: variants that are made to take the fused finalize.
        candidates: settings that an engine could use; only those that cannot fuse and ran to the end count.
        asked: the variant with the case's own settings; may be one of the others too.
        cannot_differ: why this case has the same bits in any order of additions.
        unavailable: why the case cannot run here, and what could run it.
    """
    if unavailable is not None:
        return Decision("unsupported", unavailable)
    if cannot_differ is not None:
        return Decision("vacuous-control", f"nothing could differ here: {cannot_differ}")
    tried = [*controls, *candidates]
    if tried and all(not result.runs and result.reason for result in tried):
        return Decision("unsupported", f"no variant ran; {tried[0].name}: {tried[0].reason}")
    ran = [control for control in controls if control.runs]
    if not ran:
        failure = next((f"; {c.name}: {c.reason}" for c in controls if c.reason), "")
        return Decision("vacuous-control", f"no positive control ran, so stability shows nothing{failure}")
    differed = [control for control in ran if control.runs_differing and control.fused is not False]
    return _with_difference(differed[0], candidates, asked) if differed else _without_difference(ran)


def _without_difference(ran: Sequence[VariantResult]) -> Decision:
    fused = [control for control in ran if control.fused and not control.runs_differing]
    if not fused:
        control = ran[0]
        what = "did not run" if control.fused is False else "cannot be shown to have run"
        return Decision("vacuous-control", f"the fused kernel {what} in {control.name}", control.name)
    control = max(fused, key=lambda result: result.runs)
    reason = (
        f"{control.name} ran the fused kernel {control.runs} times and did not differ ({_bound(control)})"
    )
    return Decision("not-reproduced", reason, control.name)


def _with_difference(
    control: VariantResult, candidates: Sequence[VariantResult], asked: VariantResult | None
) -> Decision:
    seen = f"{control.name} differs in {control.runs_differing} of {control.runs} runs"
    safe = [candidate for candidate in candidates if candidate.can_fuse is False]
    stable = tuple(c for c in safe if c.runs and not c.runs_differing and c.reason is None)
    if not stable:
        return Decision("vacuous-control", f"{seen}, but {_no_candidate(safe)}", control.name)
    if asked is not None and asked.can_fuse and asked.fused is False and not asked.runs_differing:
        reason = (
            f"{asked.name}, the case's own settings, may take the fused kernel and did not "
            f"({asked.tactic or 'tactic unknown'}), so that it is stable shows nothing: "
            "tune and capture again, or rule the fused kernel out as recommended"
        )
        return Decision("vacuous-control", reason, control.name, stable)
    told = tuple(candidate for candidate in stable if _tells_apart(control, candidate))
    if not told:
        chance = f"{stable[0].name} in 0 of {stable[0].runs} can be chance; use more runs"
        return Decision("vacuous-control", f"{seen}, and that {chance}", control.name)
    stable = told
    names = " and ".join(f"{c.name} in 0 of {c.runs} ({_bound(c)})" for c in stable)
    return Decision("confirmed", f"{seen}, {names}", control.name, stable)


def _tells_apart(control: VariantResult, candidate: VariantResult) -> bool:
    """Whether a candidate as unstable as the control would have shown it, by Fisher's exact test at 5%."""
    same = control.runs - control.runs_differing
    return fisher_exact(control.runs_differing, same, 0, candidate.runs) <= 1 - CONFIDENCE


def _bound(result: VariantResult) -> str:
    """Rounded up: a bound must stay one."""
    return f"at most {ceil(result.bound * 1000 - 1e-9) / 10:.1f}% of runs, 95% confidence"


def _no_candidate(safe: Sequence[VariantResult]) -> str:
    failed = next((c for c in safe if c.reason), None)
    differing = next((c for c in safe if c.runs_differing), None)
    if differing is not None:
        return (
            f"so does {differing.name} without the fused kernel, in {differing.runs_differing} of "
            f"{differing.runs}: something else varies, and the control singles out nothing"
        )
    if failed is not None:
        return f"{failed.name} did not run to the end: {failed.reason}"
    return "there is no candidate that rules the fused kernel out"


def exit_code(reports: Iterable[KernelReport]) -> int:
    """1 if the asked configuration of any case differs, 0 if that of every case is stable, else 3.

    The asked configuration is the variant with the case's own settings. It is stable if it cannot take the
    fused kernel, ran to the end without a difference, and the case is confirmed, so that a difference would
    have shown. One that may take the fused kernel and did not differ is undecided.
    """
    codes = {_exit_code(report) for report in reports}
    if EXIT_NONDETERMINISTIC in codes:
        return EXIT_NONDETERMINISTIC
    return EXIT_STABLE if codes == {EXIT_STABLE} else EXIT_INCONCLUSIVE


def _exit_code(report: KernelReport) -> int:
    asked = next((variant for variant in report.variants if variant.name == report.asked), None)
    if asked is not None and asked.runs_differing:
        return EXIT_NONDETERMINISTIC
    stable = asked is not None and asked.can_fuse is False and asked.runs > 0 and asked.reason is None
    return EXIT_STABLE if stable and report.outcome == "confirmed" else EXIT_INCONCLUSIVE
