"""Runs a case under its variants: a first run, then the repeats that are compared with it.

Variants take turns, a batch each, so that a clock that drifts or a noisy neighbour touches all of them and
the ratios of their times stay honest. On CUDA the host synchronises once per batch only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from detaudit.core.digest import digest
from detaudit.core.records import VariantResult
from detaudit.core.stats import rate
from detaudit.kernels.backend import Backend, Fill, Prepared, Variant
from detaudit.kernels.cases import Case
from detaudit.kernels.comparison import Agreement, Comparison, Ring, as_words

RUNS = 300
"""Comparisons per variant by default: with no difference among them the rate is at most 1.0%."""

FILLS: tuple[Fill, ...] = ("random", "zeros", "ones")
WATCHED_BYTES = 64 << 20
"""Arguments up to this size are checked for having been changed by the kernel."""

Progress = Callable[[str, int, int], None]
"""Called with what is running, how many runs are done, and how many there will be."""


def run_variants(
    backend: Backend,
    case: Case,
    variants: Sequence[Variant],
    *,
    runs: int = RUNS,
    progress: Progress | None = None,
) -> tuple[VariantResult, ...]:
    """Run every variant once, then ``runs`` times more, and compare.

    A variant that raises keeps what it had shown until then, with the reason; the others go on.

    Args:
        case: on the device it is to run on.
    """
    reference = _fp64(backend, case)
    ring: Ring | None = None
    trials: list[_Trial] = []
    for variant in variants:
        trial = _Trial(case, variant)
        ring = trial.start(backend, ring)
        trials.append(trial)
    total = len(trials) * runs
    while running := [trial for trial in trials if trial.failure is None and trial.done < runs]:
        for trial in running:
            if progress:
                progress(f"{case.name}: {trial.variant.name}", sum(t.done for t in trials), total)
            trial.batch(runs)
    if progress:
        progress(case.name, total, total)
    return _results(trials, reference)


class _Trial:
    """One variant on its way through its runs. Whatever it raises becomes its ``failure``."""

    def __init__(self, case: Case, variant: Variant) -> None:
        self.case = case
        self.variant = variant
        self.failure: str | None = None
        self.tactic: str | None = None
        self.fused: bool | None = None
        self.times: list[float] = []
        self.done = 0
        self._live: tuple[Prepared, Comparison] | None = None
        self._clock = _Clock(case.device)
        self._fills = cycle(FILLS)

    def start(self, backend: Backend, ring: Ring | None) -> Ring | None:
        """Prepare, and make the run that all others are compared with."""
        try:
            watched = {n: t.clone() for n, t in self.case.tensors.items() if t.nbytes <= WATCHED_BYTES}
            prepared = backend.prepare(self.case, self.variant)
            with prepared.active():
                fill = next(self._fills)
                prepared.poison(fill)
                output = prepared.run()
                self._require_unchanged(watched)
                if ring is None or not ring.fits(output):
                    ring = Ring(output)
                self._live = prepared, Comparison(output, fill, ring)
                self.tactic, self.fused = prepared.tactic(), prepared.fused()
        except Exception as error:
            self._fail(error, "before its first output")
        return ring

    def batch(self, runs: int) -> None:
        """Up to a ring's worth of further runs."""
        assert self._live is not None
        prepared, comparison = self._live
        try:
            with prepared.active():
                while self.done + comparison.pending < runs and not comparison.full:
                    fill = next(self._fills)
                    prepared.poison(fill)
                    with self._clock:
                        output = prepared.run()
                    comparison.add(output, fill)
                self.done += comparison.flush()
                self.times += self._clock.read()
                self.tactic, self.fused = prepared.tactic(), prepared.fused()
        except Exception as error:
            self._fail(error, f"after {self.done} runs")

    def measure(self, reference: Tensor | None) -> _Measured:
        """What the runs showed; nothing if the device is lost to a failed kernel."""
        if self._live is None:
            return _Measured()
        comparison = self._live[1]
        try:
            return _Measured(
                agreement=comparison.result() if self.done else None,
                rel_error=_relative_error(comparison.reference, reference),
                digest=digest(comparison.reference).root.hex(),
            )
        except Exception as error:
            self._fail(error, "while its outputs were compared")
            return _Measured()

    def _require_unchanged(self, watched: dict[str, Tensor]) -> None:
        for name, before in watched.items():
            if not torch.equal(as_words(before), as_words(self.case.tensors[name])):
                raise ValueError(f"the kernel changes its argument {name}, so no two runs have equal inputs")

    def _fail(self, error: Exception, when: str) -> None:
        text = " ".join(str(error).split())
        self.failure = self.failure or f"{type(error).__name__} {when}: {text[:300]}"


@dataclass(frozen=True, slots=True)
class _Measured:
    agreement: Agreement | None = None
    rel_error: float | None = None
    digest: str | None = None


class _Clock:
    """Times single runs without synchronising; ``read`` after a synchronisation. Milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times: list[float] = []
        self._start = 0.0

    def __enter__(self) -> None:
        if self._cuda:
            pair = (_event(), _event())
            self._events.append(pair)
            pair[0].record()
        else:
            self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._times.append((time.perf_counter() - self._start) * 1e3)

    def read(self) -> list[float]:
        times = self._times + [start.elapsed_time(end) for start, end in self._events]
        self._events, self._times = [], []
        return times


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _fp64(backend: Backend, case: Case) -> Tensor | None:
    try:
        return backend.reference_fp64(case)
    except (torch.OutOfMemoryError, MemoryError):
        return None


def _results(trials: Sequence[_Trial], reference: Tensor | None) -> tuple[VariantResult, ...]:
    asked = next((trial for trial in trials if trial.variant.asked), None)
    base = statistics.median(asked.times) if asked and asked.times else None
    return tuple(_result(trial, base, reference) for trial in trials)


def _result(trial: _Trial, base_ms: float | None, reference: Tensor | None) -> VariantResult:
    measured = trial.measure(reference)
    seen = measured.agreement or _NOTHING
    median = statistics.median(trial.times) if trial.times else None
    return VariantResult(
        name=trial.variant.name,
        settings=trial.variant.settings,
        tactic=trial.tactic,
        runs=seen.runs,
        runs_differing=seen.runs_differing,
        distinct=seen.distinct,
        bound=rate(seen.runs_differing, seen.runs).high,
        max_ulp=seen.max_ulp,
        max_abs=seen.max_abs,
        rel_error=measured.rel_error,
        median_ms=median,
        ratio=median / base_ms if median is not None and base_ms else None,
        rows_differing=seen.rows_differing,
        rows_total=seen.rows_total,
        fused=trial.fused,
        can_fuse=trial.variant.can_fuse,
        reason=trial.failure,
        note=_STALE if seen.follows_fill else None,
        digest=measured.digest,
    )


_NOTHING = Agreement(
    runs=0,
    runs_differing=0,
    distinct=0,
    rows_differing=0,
    rows_total=None,
    max_ulp=None,
    max_abs=None,
    follows_fill=False,
)
_STALE = "the output depends on what its buffers held before the call (dirty-output-buffer), not on a race"


def _relative_error(output: Tensor, reference: Tensor | None) -> float | None:
    """||y - ref|| / ||ref|| in float64; ``None`` where there is no reference of that shape or it is zero."""
    if reference is None or output.shape != reference.shape:
        return None
    norm = reference.norm()
    error = (output.to(torch.float64) - reference.to(output.device)).norm()
    return float(error / norm) if norm > 0 else None
