"""FlashInfer's choice of tactics: asked, answered for it, and made anew in an empty cache.

``cutlass_fused_moe`` asks ``AutoTuner.get().choose_one`` twice, for GEMM1 and GEMM2, in every release from
0.6.15 to 0.7.4. So all of it is done by putting another tuner in the place of ``AutoTuner._instance`` for a
while: ``profile_ids`` came with 0.6.17 only, and a tuner of one's own is also what an empty cache is.
"""

from __future__ import annotations

import inspect
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from typing import Any

GEMM1 = "trtllm::fused_moe::gemm1"
GEMM2 = "trtllm::fused_moe::gemm2"
UNTUNED = -1
"""What the tuner answers where nothing was tuned: the first tactic of the list."""

Launch = Callable[[], object]
Choose = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Tactics:
    """Positions in the runner's list of tactics, GEMM1 before GEMM2; ``UNTUNED`` takes the first of each."""

    gemm1: int = UNTUNED
    gemm2: int = UNTUNED

    def __str__(self) -> str:
        return ", ".join(
            f"{gemm} {'first' if tactic == UNTUNED else tactic}"
            for gemm, tactic in (("gemm1", self.gemm1), ("gemm2", self.gemm2))
        )


@contextmanager
def answering(tactics: Tactics) -> Iterator[None]:
    """FlashInfer is given these tactics, whatever was tuned."""
    answers = {GEMM1: tactics.gemm1, GEMM2: tactics.gemm2}

    def choose(operator: str, runners: list[Any], *_: object, **__: object) -> tuple[Any, Any]:
        return runners[0], answers.get(operator, UNTUNED)

    with _installed(_Stand(choose)):
        yield


def runner_of(launch: Launch) -> Any:
    """The compiled runner that a call would use, which owns its tactics. Nothing is launched."""

    def choose(operator: str, runners: list[Any], *_: object, **__: object) -> tuple[Any, Any]:
        raise _Enough(runners[0])

    with _installed(_Stand(choose)):
        try:
            launch()
        except _Enough as enough:
            return enough.found.fused_moe_runner
    raise RuntimeError("FlashInfer did not ask its autotuner for a tactic, so its runner cannot be reached")


def in_use(launch: Launch) -> Tactics:
    """The tactics that a call would take as this process is tuned now. Nothing is launched."""
    tuner = _tuner_class().get()
    chosen: dict[str, int] = {}

    def choose(operator: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        runner, tactic = tuner.choose_one(operator, *args, **kwargs)
        chosen[operator] = tactic
        if operator == GEMM2:
            raise _Enough(runner)
        return runner, tactic

    with _installed(_Stand(choose)), suppress(_Enough):
        launch()
    return Tactics(chosen.get(GEMM1, UNTUNED), chosen.get(GEMM2, UNTUNED))


def tune(launch: Launch, tokens: int) -> Tactics:
    """Tune one call in an empty cache, for its own number of tokens only. The cache in use is left alone."""
    from flashinfer.autotuner import autotune

    tuner = _tuner_class()()
    choose = tuner.choose_one
    chosen: dict[str, int] = {}

    def noting(operator: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        runner, tactic = choose(operator, *args, **kwargs)
        chosen[operator] = tactic
        return runner, tactic

    tuner.choose_one = noting
    buckets: dict[str, Any] = {}
    if "tuning_buckets" in inspect.signature(autotune).parameters:
        buckets = {"tuning_buckets": (tokens,)}
    with _installed(tuner), _quiet(), autotune(True, **buckets):
        launch()
    return Tactics(chosen.get(GEMM1, UNTUNED), chosen.get(GEMM2, UNTUNED))


class _Enough(Exception):
    """Ends a call of FlashInfer once it has shown what was asked."""

    def __init__(self, found: Any) -> None:
        super().__init__("asked, not run")
        self.found = found


class _Stand:
    """Stands in for the tuner in use, and answers in its place."""

    def __init__(self, choose: Choose) -> None:
        self.choose_one = choose
        self._tuner = _tuner_class().get()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuner, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """FlashInfer announces each tuning on stderr, and shows a bar."""
    from flashinfer.jit.core import logger

    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _tuner_class() -> Any:
    from flashinfer.autotuner import AutoTuner

    return AutoTuner


@contextmanager
def _installed(tuner: Any) -> Iterator[None]:
    cls = _tuner_class()
    before = cls.get()
    cls._instance = tuner
    try:
        yield
    finally:
        cls._instance = before
