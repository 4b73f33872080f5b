"""Which operator inside a module differs: digests of what each one read and wrote, and their comparison.

Only for the few modules that are known to differ; it hashes every tensor of every operator inside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from detaudit.core.digest import Digester
from detaudit.core.recording import SCALAR_PREFIX, CallKey, Record
from detaudit.hooks.dispatch import Watcher
from detaudit.hooks.observe import PendingRecord, generator_states, observe

OPERATOR_LIMIT = 200_000

_UNINITIALISED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::resize_",
    }
)
"""What these return is whatever the memory held."""

_OVERWRITING = frozenset(
    {
        "aten::bernoulli_",
        "aten::cauchy_",
        "aten::copy_",
        "aten::exponential_",
        "aten::fill_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::normal_",
        "aten::random_",
        "aten::uniform_",
        "aten::zero_",
    }
)
"""These do not read the tensor they write, so its former contents are no input."""


_FROM_HOST = frozenset({"aten.lift_fresh.default", "aten.lift_fresh_copy.default"})
"""What ``torch.tensor`` calls with the data it was given."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator call.

    Args:
        name: ``aten.index_put_.default``.
        module, call: the module call it ran in.
        index: its position among the operators of that module call.
        inputs: tensors and scalars handed in, before it ran (``args[0]``, ``kwargs.alpha``); for operators
            that
            draw random numbers the generators' states too (``rng.cpu``).
        outputs: what it returned (``out``) and the inputs it wrote to (``mutated.args[0]``). Empty for views
            and for uninitialised memory.
        error: the exception's class name, if it raised.
    """

    name: str
    module: str
    call: int
    index: int
    inputs: Record
    outputs: Record
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """The first difference between the operators of two runs.

    Args:
        operator, module, call, index: where, in the first of the two runs.
        occurrence: 0 for the first operator of this name in the module call, then 1, ...
        kind: ``outputs``, it was given equal inputs and made different outputs. ``inputs``, it was given
            different inputs although nothing seen before made them: uninitialised memory, or a kernel that
            torch's dispatcher does not see. ``host``, it was given equal tensors, and host scalars, host data
            or generator states that differ. ``sequence``, another operator (or none) ran in its place.
        sites: the sites that differ; empty for ``sequence``.
    """

    operator: str
    module: str
    call: int
    index: int
    occurrence: int
    kind: Literal["outputs", "inputs", "host", "sequence"]
    sites: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    name: str
    at: CallKey
    index: int
    inputs: PendingRecord
    outputs: PendingRecord = field(default_factory=PendingRecord)
    error: str | None = None


class OperatorTap(Watcher):  # type: ignore[no-untyped-call]
    """Records the operators that run while ``call()`` names a module call; others pass through.

    Use it around a run, on the run's thread: ``with tap: model(x)``, then ``digester.finish()``, then
    ``tap.operators()``. ``within(recorder.current_call, modules)`` makes a ``call`` for some modules.

    Args:
        digester: takes the tensors as they are at that moment.
        call: the module call to record under, or None where nothing is to be recorded.
        limit: operators kept; ``dropped`` counts those beyond it.
    """

    def __init__(
        self, digester: Digester, call: Callable[[], CallKey | None], limit: int = OPERATOR_LIMIT
    ) -> None:
        super().__init__()
        self.dropped = 0
        self._digester = digester
        self._call = call
        self._limit = limit
        self._seen: list[_Seen] = []
        self._counts: dict[CallKey, int] = {}

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at = self._call()
        if at is None:
            return func(*args, **kwargs)
        if len(self._seen) >= self._limit:
            self.dropped += 1
            return func(*args, **kwargs)
        index = self._counts.get(at, 0)
        self._counts[at] = index + 1
        traits = _traits(func)
        seen = _Seen(str(func), at, index, self._inputs(traits, args, kwargs))
        self._seen.append(seen)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            seen.error = type(error).__name__
            raise
        seen.outputs = self._outputs(traits, args, kwargs, result)
        return result

    def operators(self) -> list[Operator]:
        """What was recorded, in order; only after the digester's ``finish()``."""
        return [
            Operator(s.name, *s.at, s.index, s.inputs.resolve()[0], s.outputs.resolve()[0], s.error)
            for s in self._seen
        ]

    def _inputs(self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingRecord:
        read = {f"[{i}]": a for i, a in enumerate(args) if traits.reads(i)}
        named = {key: a for key, a in kwargs.items() if traits.reads(key)}
        record = _observe({f"args{key}": value for key, value in read.items()}, self._digester)
        _extend(record, _observe({f"kwargs.{key}": value for key, value in named.items()}, self._digester))
        if traits.draws:
            _extend(record, _observe(dict(generator_states()), self._digester))
        return record

    def _outputs(
        self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> PendingRecord:
        written = {f"mutated.args[{i}]": a for i, a in enumerate(args) if traits.writes(i)}
        written |= {f"mutated.kwargs.{key}": a for key, a in kwargs.items() if traits.writes(key)}
        if traits.returns_new:
            written["out"] = result
        return _observe(written, self._digester)


def within(
    current_call: Callable[[], CallKey | None], modules: Collection[str]
) -> Callable[[], CallKey | None]:
    """A ``call`` for ``OperatorTap``: the innermost module call, while it is one of ``modules`` or inside
    one."""

    def call() -> CallKey | None:
        at = current_call()
        if at is None or not any(_holds(module, at[0]) for module in modules):
            return None
        return at

    return call


def _holds(module: str, path: str) -> bool:
    return not module or path == module or path.startswith(module + ".")


def first_differing(a: Sequence[Operator], b: Sequence[Operator]) -> OperatorDifference | None:
    """The first operator of run ``a`` that was given equal inputs in ``b`` and made different outputs there.

    Where there is none, the first difference of another kind; None if all operators agree.
    """
    others = {(op.module, op.call, op.index): op for op in b}
    broken: set[CallKey] = set()
    fallback: OperatorDifference | None = None
    counts: dict[tuple[str, int, str], int] = {}
    for op in a:
        occurrence = counts.get((op.module, op.call, op.name), 0)
        counts[op.module, op.call, op.name] = occurrence + 1
        if (op.module, op.call) in broken:
            continue
        difference = _compare(op, others.get((op.module, op.call, op.index)), occurrence)
        if difference is None:
            continue
        if difference.kind == "outputs":
            return difference
        if difference.kind == "sequence":
            broken.add((op.module, op.call))  # behind it positions no longer correspond
        fallback = fallback or difference
    return fallback or _extra(a, b)


def _compare(op: Operator, other: Operator | None, occurrence: int) -> OperatorDifference | None:
    place = (op.name, op.module, op.call, op.index, occurrence)
    if other is None or other.name != op.name:
        return OperatorDifference(*place, "sequence")
    if op.inputs != other.inputs:
        sites = _sites(op.inputs, other.inputs)
        host = op.name in _FROM_HOST or all(map(_is_host(op, other), sites))
        return OperatorDifference(*place, "host" if host else "inputs", sites)
    if op.outputs != other.outputs:
        return OperatorDifference(*place, "outputs", _sites(op.outputs, other.outputs))
    return None


def _is_host(op: Operator, other: Operator) -> Callable[[str], bool]:
    """Whether a site held a Python scalar or a generator's state in both."""
    values = [dict(op.inputs), dict(other.inputs)]

    def is_host(site: str) -> bool:
        if site.startswith("rng.") or site.endswith(".generator"):
            return True
        return all(site not in held or held[site].dtype.startswith(SCALAR_PREFIX) for held in values)

    return is_host


def _extra(a: Sequence[Operator], b: Sequence[Operator]) -> OperatorDifference | None:
    known = {(op.module, op.call, op.index) for op in a}
    for op in b:
        if (op.module, op.call, op.index) not in known:
            return OperatorDifference(op.name, op.module, op.call, op.index, 0, "sequence")
    return None


def _sites(a: Record, b: Record) -> tuple[str, ...]:
    ours, theirs = dict(a), dict(b)
    return tuple(site for site in sorted({*ours, *theirs}) if ours.get(site) != theirs.get(site))


@dataclass(frozen=True, slots=True)
class _Traits:
    """What an operator's schema says. ``None`` in ``written`` stands for: it says nothing one could trust."""

    written: frozenset[int | str] | None
    unread: frozenset[int | str]
    returns_new: bool
    draws: bool

    def writes(self, argument: int | str) -> bool:
        return self.written is None or argument in self.written

    def reads(self, argument: int | str) -> bool:
        return argument not in self.unread


@functools.lru_cache(maxsize=4096)
def _traits(func: Any) -> _Traits:
    schema = getattr(func, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    if schema is None:
        return _Traits(None, frozenset(), True, draws)
    written: set[int | str] = set()
    unread: set[int | str] = set()
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {index, argument.name}
            if argument.is_out or schema.name in _OVERWRITING:
                unread |= {index, argument.name}
    # A custom operator's schema is what its author wrote; torch's own are tested.
    trusted = func.namespace in ("aten", "prims", "prim")
    alias = trusted and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    view = alias and not written and str(func) not in _FROM_HOST
    if view or schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
        unread |= {0, schema.arguments[0].name}  # the size and the strides are all they look at
    returns_new = schema.name not in _UNINITIALISED and not alias
    return _Traits(frozenset(written) if trusted else None, frozenset(unread), returns_new, draws)


def _observe(values: dict[str, Any], digester: Digester) -> PendingRecord:
    record = PendingRecord()
    for site, value in values.items():
        _extend(record, observe(value, site, digester))
    return record


def _extend(record: PendingRecord, other: PendingRecord) -> None:
    record.entries.extend(other.entries)
    record.unobserved.extend(other.unobserved)
