"""How an audit is to be made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_RUNS = 20
DEFAULT_KERNEL_RUNS = 300
DEFAULT_CAPTURE_BYTES = 4 << 30
"""One bf16 layer of 128 experts (hidden 2048, intermediate 768) alone takes 1.2 GB."""


@dataclass(frozen=True, slots=True)
class Options:
    """What ``detaudit run`` was asked for.

    Args:
        runs: recorded runs; at least 1, and 2 for anything to be compared.
        only, exclude: globs over module paths; what they leave out is not recorded.
        history: whether two fresh processes repeat the sequence when something differs.
        observer: whether some runs go without recording, for comparison.
        confirm: whether kernels found at fault are rerun alone.
        kernel_runs: runs of each kernel variant.
        capture_bytes: most bytes of tensors that the capture pass keeps at a time.
    """

    runs: int = DEFAULT_RUNS
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    history: bool = True
    observer: bool = True
    confirm: bool = True
    kernel_runs: int = DEFAULT_KERNEL_RUNS
    capture_bytes: int = DEFAULT_CAPTURE_BYTES

    def schedule(self) -> tuple[bool, ...]:
        """For each run of the sequence, whether it is recorded.

        Unrecorded runs (about one for every five recorded) are spread through the sequence, never first, so
        that both kinds see the same warm-up.
        """
        if not self.observer or self.runs < 2:
            return (True,) * self.runs
        unrecorded = max(2, self.runs // 5)
        after = {1 + index * (self.runs - 1) // unrecorded for index in range(unrecorded)}
        return tuple(
            kind for run in range(self.runs) for kind in ((True, False) if run in after else (True,))
        )


def command_line(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """What follows ``detaudit run TARGET`` to make a trace's audit again, but for the number of runs.

    Args:
        meta: the trace's, of which ``mode``, ``options`` (the fields of ``Options``) and ``argv`` are read.
    """
    options = meta.get("options") or {}
    words = ["--script"] if meta.get("mode") == "script" else []
    for name in ("only", "exclude"):
        for glob in options.get(name, ()):
            words += [f"--{name}", glob]
    words += [f"--no-{name}" for name in ("history", "observer", "confirm") if options.get(name) is False]
    for name, default in (("kernel_runs", DEFAULT_KERNEL_RUNS), ("capture_bytes", DEFAULT_CAPTURE_BYTES)):
        if options.get(name, default) != default:
            words += [f"--{name.replace('_', '-')}", str(options[name])]
    argv = meta.get("argv") or ()
    return (*words, "--", *argv) if argv else tuple(words)
