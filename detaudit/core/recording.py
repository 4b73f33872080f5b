"""What a run leaves behind: values, calls, runs. Plain data; never imports torch.

A *value* is the identity of one tensor or host scalar; a *record* is a sorted tuple of (site path, value);
a *call* is one invocation of one module; a *run* is all calls of one execution of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

IN_PROCESS = "in-process"
FRESH_PROCESS = "fresh-process"
HOOKS_OFF = "hooks-off"
HISTORY = ("history-1", "history-2")
SUPERSEDED = "superseded"
HELD_FIXED = "held-fixed"
"""Conditions of runs. A superseded run was made again under better control and is not compared. In
``held-fixed-N`` the outputs of the origins known so far were held fixed, to see what else differs."""

CallKey = tuple[str, int]
"""(module path, ordinal of that module's calls in the run)."""

SCALAR_PREFIX = "python."
"""dtype of a host scalar is this prefix and the type name: ``python.int``, ``python.str``, ..."""


@dataclass(frozen=True, slots=True)
class Value:
    """Identity of one tensor's bytes, dtype and shape, or of one host scalar.

    Args:
        root: 16 bytes, the XXH3-128 root of detaudit.core.geometry.
        dtype: torch's name without ``torch.`` (``bfloat16``), or ``python.int`` and the like.
        shape: the tensor's shape; empty for a scalar.
        leaves: leaf digests, 8 bytes each, little-endian; ``None`` where they were not kept.
        raw: the bytes themselves, kept for small values only (at most 4 KiB); a scalar's text in UTF-8.
    """

    root: bytes
    dtype: str
    shape: tuple[int, ...] = ()
    leaves: bytes | None = field(default=None, compare=False)
    raw: bytes | None = field(default=None, compare=False, repr=False)


Record = tuple[tuple[str, Value], ...]
"""(site path, value) pairs sorted by site path; equal records mean equal bits at every site."""


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation of one module in one run.

    Args:
        module: path as in ``named_modules()``; the root is the empty string.
        cls: the module's class name.
        ordinal: 0 for the module's first call in the run, then 1, ...
        parent: index of the enclosing call in ``Run.calls``, or -1.
        args: every tensor and host scalar handed in, and the torch generator states on entry
            (sites ``args[0]``, ``kwargs.x``, ``rng.cpu``, ``rng.cuda:0``).
        state: the module's own state on entry (``buffer.cache``, ``attr.step``); parameters are not in it.
        out: everything returned (``out``, ``out[1].hidden``), inputs changed in place
            (``mutated.args[0]``), and own state changed during the call (``buffer.cache``, ``attr.step``).
        via: ``call``, ``forward`` (called as ``child.forward(x)``) or ``graph`` (a CUDA graph replay).
        error: the exception's class name if the call raised, else ``None``.
    """

    module: str
    cls: str
    ordinal: int
    parent: int
    args: Record
    state: Record
    out: Record
    via: str = "call"
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of the target. ``calls`` are in execution order, a parent before its children.

    Args:
        condition: ``in-process``, ``fresh-process``, ``hooks-off``, ``history-1``, ``history-2``, ...
        position: how many runs of this process came before it (hooks-off runs counted in).
        process: identifies the process within the trace (0 for the auditing process).
        calls: empty for a hooks-off run.
        records: run-level records by name: ``inputs``, ``final`` (sites ``out...``), ``grad``
            (``grad.<parameter path>``), ``parameters.before``, ``parameters.after``, ``large.start``,
            ``large.end`` (state over 64 MiB), ``generators``. Absent where not taken.
        unobserved: (module path, site, reason) of what could not be seen.
        seconds: wall time of the target alone.
    """

    condition: str
    position: int
    process: int
    calls: Sequence[Call]
    records: Mapping[str, Record]
    unobserved: tuple[tuple[str, str, str], ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module seen in a run, or known to exist in the built model. ``aliases``: its other paths."""

    path: str
    cls: str
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class RunColumns:
    """A run as the trace keeps it: one C int array per column, all of equal length (one entry a call).

    ``module`` indexes ``TraceView.modules``; ``args``, ``state`` and ``out`` are record ids; ``flags``
    indexes ``TraceView.flags`` ((via, error) pairs). Ordinals follow by counting ``module`` from the front.
    """

    index: int
    condition: str
    position: int
    process: int
    seconds: float
    module: Sequence[int]
    parent: Sequence[int]
    args: Sequence[int]
    state: Sequence[int]
    out: Sequence[int]
    flags: Sequence[int]
    records: Mapping[str, int]
    unobserved: tuple[tuple[str, str, str], ...] = ()


class TraceView(Protocol):
    """What the comparison needs of a trace; equal ids mean equal content, different ids different content."""

    @property
    def modules(self) -> Sequence[ModuleInfo]: ...

    @property
    def flags(self) -> Sequence[tuple[str, str | None]]: ...

    @property
    def meta(self) -> Mapping[str, object]:
        """Written once: target, argv, options, environment, restored, coverage, ..."""
        ...

    def runs(self) -> Sequence[RunColumns]: ...

    def record(self, record_id: int) -> tuple[tuple[str, int], ...]:
        """(site path, value id) pairs of a record, sorted by site path."""
        ...

    def value(self, value_id: int) -> Value: ...

    def rows_differing(self, value_a: int, value_b: int) -> tuple[int, ...] | None:
        """Rows (indices over all dimensions but the last, flattened) whose leaves differ; None if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of a tapped function, with the arguments themselves (tensors cloned when captured).

    Args:
        entry: ``module:function``, such as ``flashinfer.fused_moe:cutlass_fused_moe``.
        module: path of the innermost module it happened in.
        call: ordinal of that module's call.
        tensors: argument path to tensor (``input``, ``quant_scales[2]``); typed loosely, since this file
            never imports torch.
        parameters: the other arguments, JSON-compatible.
        context: library version, autotuner state and the like, JSON-compatible.
    """

    entry: str
    module: str
    call: int
    tensors: Mapping[str, object]
    parameters: Mapping[str, object]
    context: Mapping[str, object] = field(default_factory=dict)
