"""Which operator inside a module differs: digests of what each one read and wrote, and their comparison.

Only for the few modules that are known to differ; it hashes every tensor of every operator inside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from detaudit.core.digest import Digester
from detaudit.core.recording import SCALAR_PREFIX, CallKey, Record
from detaudit.hooks.dispatch import Watcher
from detaudit.hooks.made_memory import MadeMemory
from detaudit.hooks.observe import PendingRecord, generator_states, observe_leaves
from detaudit.hooks.tree import flatten

OPERATOR_LIMIT = 200_000
Kind = Literal["outputs", "unwritten", "changed", "inputs", "host", "sequence"]

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
        written: of inputs whose memory an operator recorded before made without contents (``aten.empty``),
            what has been written there: zeros stand for what is as it was.
        made: sites of inputs whose memory an operator recorded before made.
    """

    name: str
    module: str
    call: int
    index: int
    inputs: Record
    outputs: Record
    error: str | None = None
    written: Record = ()
    made: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OperatorDifference:
    """The first difference between the operators of two runs.

    Args:
        operator, module, call, index: where, in the first of the two runs.
        occurrence: 0 for the first operator of this name in the module call, then 1, ...
        kind: ``outputs``, it was given equal inputs and made different outputs. ``unwritten``, it was given
            memory that recorded operators made, and that differs only where nothing has written to it.
            ``changed``, it was given memory that recorded operators made, and that something else wrote to: a
            kernel that torch's dispatcher does not see, another thread. ``inputs``, it was given different
            inputs, made where nothing was recorded. ``host``, it was given equal tensors, and host scalars,
            host data or generator states that differ. ``sequence``, another operator (or none) ran in its
            place.
        sites: the sites that differ; empty for ``sequence``.
    """

    operator: str
    module: str
    call: int
    index: int
    occurrence: int
    kind: Kind
    sites: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    name: str
    at: CallKey
    index: int
    inputs: PendingRecord
    written: PendingRecord
    made: frozenset[str]
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
        self._memory = MadeMemory()

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
        leaves = _read(traits, args, kwargs)
        tensors = [(site, leaf) for site, leaf in leaves if isinstance(leaf, Tensor)]
        made = frozenset(site for site, tensor in tensors if self._memory.made(tensor))
        inputs, written = observe_leaves(leaves, self._digester), self._written(tensors)
        seen = _Seen(str(func), at, index, inputs, written, made)
        self._seen.append(seen)
        try:
            result = func(*args, **kwargs)
        except BaseException as error:
            seen.error = type(error).__name__
            raise
        seen.outputs = self._outputs(traits, args, kwargs, result)
        self._memory.follow(_tensors((args, kwargs)), _tensors(result), traits.leaves_unwritten)
        return result

    def operators(self) -> list[Operator]:
        """What was recorded, in order; only after the digester's ``finish()``."""
        return [
            Operator(
                s.name,
                *s.at,
                s.index,
                s.inputs.resolve()[0],
                s.outputs.resolve()[0],
                s.error,
                s.written.resolve()[0],
                s.made,
            )
            for s in self._seen
        ]

    def _written(self, tensors: Sequence[tuple[str, Tensor]]) -> PendingRecord:
        written = ((site, self._memory.written(tensor)) for site, tensor in tensors)
        return observe_leaves(((site, bits) for site, bits in written if bits is not None), self._digester)

    def _outputs(
        self, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> PendingRecord:
        written = {f"mutated.args[{i}]": a for i, a in enumerate(args) if traits.writes(i)}
        written |= {f"mutated.kwargs.{key}": a for key, a in kwargs.items() if traits.writes(key)}
        if traits.returns_new:
            written["out"] = result
        leaves = (leaf for site, value in written.items() for leaf in flatten(value, site))
        return observe_leaves(leaves, self._digester)


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
        return OperatorDifference(*place, _given(op, other, sites), sites)
    if op.outputs != other.outputs:
        return OperatorDifference(*place, "outputs", _sites(op.outputs, other.outputs))
    return None


def _given(op: Operator, other: Operator, sites: Sequence[str]) -> Kind:
    """What kind of difference it was given at these sites."""
    is_host = _is_host(op, other)
    tensors = [site for site in sites if not is_host(site)]
    if op.name in _FROM_HOST or not tensors:
        return "host"
    ours, theirs = dict(op.written), dict(other.written)
    if all(site in ours and ours[site] == theirs.get(site) for site in tensors):
        return "unwritten"
    return "changed" if {*tensors} <= op.made & other.made else "inputs"


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
    leaves_unwritten: bool
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
        return _Traits(None, frozenset(), True, False, draws)
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
    unwritten = schema.name in _UNINITIALISED
    returns_new = not unwritten and not alias
    return _Traits(frozenset(written) if trusted else None, frozenset(unread), returns_new, unwritten, draws)


def _read(traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, object]]:
    """(site, leaf) of all that an operator reads."""
    read = {f"args[{i}]": a for i, a in enumerate(args) if traits.reads(i)}
    read |= {f"kwargs.{key}": a for key, a in kwargs.items() if traits.reads(key)}
    leaves = [leaf for site, value in read.items() for leaf in flatten(value, site)]
    return leaves + (list(generator_states()) if traits.draws else [])


def _tensors(value: object) -> list[Tensor]:
    return [leaf for _, leaf in flatten(value, "") if isinstance(leaf, Tensor)]
