"""Executing a script target: once, in a process of its own."""

from __future__ import annotations

import runpy
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from detaudit.core.options import Options
from detaudit.core.recording import HOOKS_OFF, Run
from detaudit.core.undecided_digester import UndecidedDigester
from detaudit.execution import Execution
from detaudit.hooks.recorder import Recorder
from detaudit.target import TargetSpec, import_context, target_errors


def execute_script(
    spec: TargetSpec,
    options: Options,
    *,
    condition: str,
    position: int,
    process: int,
    recorded: bool = True,
    capture: Iterable[tuple[str, int]] = (),
    tap: Callable[[Recorder], AbstractContextManager[object]] | None = None,
) -> Execution:
    """Run the file as ``__main__`` with its arguments; the outermost calls' outputs are the final output.

    A run that is not recorded keeps only those outputs: nothing else in it is digested. ``tap`` makes what is
    entered around the script.

    Raises:
        TargetRaised: it raised, or ended with a failure.
    """
    digester = UndecidedDigester()
    recorder = (
        Recorder(digester, only=options.only, exclude=options.exclude)
        if recorded
        else Recorder(digester, exclude=("*",))
    )
    namespace: dict[str, Any] = {}
    begun = time.perf_counter()
    with (
        import_context(spec),
        recorder.run(capture=set(capture), capture_bytes=options.capture_bytes) as recording,
        nullcontext() if tap is None else tap(recorder),
        target_errors(spec, f"it ran (run {position + 1})"),
    ):
        # Held until the digests are read: a script's modules would otherwise die with its namespace.
        namespace = runpy.run_path(str(spec.path), run_name="__main__")
    seconds = time.perf_counter() - begun
    namespace.clear()
    run = Run(
        condition=condition if recorded else HOOKS_OFF,
        position=position,
        process=process,
        calls=recording.calls if recorded else (),
        records={"final": recording.final},
        unobserved=recording.unobserved,
        seconds=seconds,
    )
    return Execution(run, recording.captured)
