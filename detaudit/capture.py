"""The capture pass: the origins once more, with their tensors.

Digests say that bits differ and where; numbers need the tensors. Runs are repeated with the inputs and
outputs of the origins kept until one differs for equal inputs. Of several origins, all but the one looked at
are held at fixed outputs, since otherwise the inputs of the later ones would never agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
import xxhash
from torch import Tensor

from detaudit.compare.classes import is_within
from detaudit.core.digest import NotObservable, digest, parts
from detaudit.core.errors import DetauditError
from detaudit.core.numbers import Difference, difference
from detaudit.core.recording import SCALAR_PREFIX, Call, CallKey, Record
from detaudit.core.records import Finding, Origin
from detaudit.execution import Execution, Session
from detaudit.hooks import generators
from detaudit.hooks.capture import CapturedCall, copy_of
from detaudit.hooks.observe import observe
from detaudit.hooks.operator_inputs import OperatorInputs
from detaudit.hooks.operators import OperatorDifference, within
from detaudit.hooks.tree import flatten
from detaudit.operator_search import OperatorSearch, explanation

Tensors = list[tuple[str, Tensor]]

ISOLATED_RUNS = 20
HELD_RUNS = 4
"""At least, with the outputs of all origins held fixed."""
UNLIKELY = 0.01
"""How probable it may at most be that an origin differs by itself and was not seen to."""
AGREES = (
    "nothing inside it differs while the outputs of the other origins are held fixed: it may have been "
    "handed a value that was not observed"
)
NO_NUMBERS = "no run of the capture pass differed for equal inputs"


@dataclass(frozen=True, slots=True)
class Handed:
    """A module that differs only because of what it was handed in a way that was not observed.

    ``maker``: the module around it in whose own code the value was made; None: another origin made it.
    """

    module: str
    maker: str | None = None


@dataclass(frozen=True, slots=True)
class Numbers:
    """How far an origin's outputs are apart, over all sites that differ; ``reason``: why there are none.

    ``agreeing``: runs with equal inputs that agreed, the outputs of all other origins being held fixed.
    """

    max_ulp: int | None = None
    max_abs: float | None = None
    value_equal: bool | None = None
    ulp_histogram: Mapping[str, int] | None = None
    has_nan: bool = False
    order_only: bool = False
    reason: str | None = None
    agreeing: int = 0

    def onto(self, origin: Origin) -> Origin:
        return replace(
            origin,
            max_ulp=self.max_ulp,
            max_abs=self.max_abs,
            value_equal=self.value_equal,
            ulp_histogram=self.ulp_histogram,
            numbers_reason=self.reason,
        )


class CapturePass:
    """Looks at the origins of a session whose runs differ.

    Args:
        attempts: most runs spent on one question about one origin.
        advance: called after each run.
    """

    def __init__(
        self,
        session: Session,
        origins: Sequence[Origin],
        *,
        attempts: int,
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session
        self.origins = origins
        self.attempts = attempts
        self.advance = advance
        self.keys = [(origin.module, origin.call) for origin in origins]
        self.operators: list[tuple[Origin, OperatorInputs]] = []
        self.handed: list[Handed] = []
        self._budget = session.options.capture_bytes
        self._search = OperatorSearch(session, self._run, attempts)
        self.reference = self._run(capture=self.keys)
        self.healed: bool | None = None
        """Whether everything else agrees with the outputs of all origins held fixed; None if not tried."""
        self.held = self._hold()

    def examine(self) -> tuple[tuple[Origin, ...], list[Finding]]:
        """The origins with what was measured on them, and what else was noticed."""
        examined: list[Origin] = []
        findings: list[Finding] = []
        # What an origin leaves in its state or in its arguments is not held.
        held_whole = all(site.startswith("out") for origin in self.origins for site in origin.sites)
        healed = self.healed if self.healed or held_whole else None
        for origin, key in zip(self.origins, self.keys, strict=True):
            numbers = self._numbers(key)
            fixed = self._fixed(but=key)
            operator = self._search.inside(origin, fixed) if self._captured(key).reason is None else None
            looked_at = replace(numbers.onto(origin), isolated=self._isolated(origin), healed=healed)
            if operator is not None:
                given = operator.kind == "inputs"
                maker = self._search.before(operator, fixed) if given else None
                looked_at = replace(looked_at, mechanism=explanation(operator, maker))
                if maker is not None and _made_around(maker, origin) and looked_at.isolated is False:
                    self.handed.append(Handed(origin.module, maker.module))
            elif numbers.agreeing and key != self.keys[0] and looked_at.isolated is False:
                looked_at = replace(looked_at, mechanism=AGREES)
                if self._is_handed(origin, numbers):
                    self.handed.append(Handed(origin.module))
            if operator is not None and operator.kind == "outputs":
                looked_at = replace(looked_at, operator=operator.operator)
                self._keep_operator(origin, operator)
            examined.append(looked_at)
            findings += _noticed(origin, numbers, operator)
        return tuple(examined), findings

    def _run(self, **options: Any) -> Execution:
        execution = self.session.execute(condition="capture", **options)
        self.advance()
        return execution

    def _captured(self, key: CallKey) -> CapturedCall:
        return self.reference.captured.get(key) or CapturedCall(reason="the call did not happen again")

    def _fixed(self, *, but: CallKey | None = None) -> dict[CallKey, Any]:
        """Outputs of the reference run for every origin but one."""
        kept = {key: self._captured(key) for key in self.keys if key != but}
        return {key: copy_of(call.output) for key, call in kept.items() if call.reason is None}

    def _numbers(self, key: CallKey) -> Numbers:
        captured = self._captured(key)
        if captured.reason is not None:
            return Numbers(reason=captured.reason)
        expected = find_call(self.reference, key)
        agreeing = 0
        for _ in range(self.attempts):
            again = self._run(capture=[key], substitute=self._fixed(but=key))
            call, kept = find_call(again, key), again.captured.get(key)
            if call is None or expected is None or kept is None or kept.reason is not None:
                continue
            if entered_with(call) != entered_with(expected):
                continue
            if call.out != expected.out:
                return numbers_of(tensors_of(captured.output), tensors_of(kept.output))
            agreeing += 1
        return Numbers(reason=f"{NO_NUMBERS} ({self.attempts} runs)", agreeing=agreeing)

    def _is_handed(self, origin: Origin, numbers: Numbers) -> bool:
        """Whether so many runs would hardly all agree if it differed by itself as often as it did before."""
        compared = self.session.options.runs - 1
        if origin.condition is not None or not compared:
            return False
        return (1 - origin.runs_differing / compared) ** numbers.agreeing < UNLIKELY

    def _keep_operator(self, origin: Origin, operator: OperatorDifference) -> None:
        """Once more, with copies of what that operator is handed: it can then be repeated alone.

        Only torch's own: others are there only once their library is imported, and are kept as kernel cases.
        """
        if operator.operator.partition(".")[0] not in ("aten", "prims"):
            return
        inputs = OperatorInputs(
            within(self.session.recorder.current_call, [origin.module]),
            (operator.module, operator.call),
            operator.index,
            operator.operator,
            self._budget,
        )
        self._run(around=inputs, substitute=self._fixed(but=(origin.module, origin.call)))
        self._budget -= inputs.bytes
        self.operators.append((origin, inputs))

    def _hold(self) -> list[Execution]:
        """Runs with the outputs of all origins held fixed; none if one of them could not be kept.

        As many as the audit has, so that its bound holds for what agrees here; once something differs, few.
        """
        if len(self._fixed()) < len(self.keys):
            return []
        held: list[Execution] = []
        self.healed = True
        while len(held) < (max(HELD_RUNS, self.session.options.runs) if self.healed else HELD_RUNS):
            held.append(self._run(substitute=self._fixed()))
            self.healed = self.healed and _agree(held[0], held[-1], self.keys)
        return held

    def _isolated(self, origin: Origin) -> bool | None:
        """Whether the module alone returns different bits for the captured inputs."""
        captured = self._captured((origin.module, origin.call))
        module = self.session.module_at(origin.module)
        if module is None or captured.reason is not None or captured.args is None:
            return None
        if not any(site.startswith("out") for site in origin.sites):
            return None  # what it returns agrees anyhow
        outputs: set[Record] = set()
        with contextlib.ExitStack() as stack:
            if not self.session.target.wants_grad:
                stack.enter_context(torch.no_grad())
            for _ in range(ISOLATED_RUNS):
                self.session.snapshot.restore()
                generators.restore(self.session.generators)
                args, kwargs = copy_of((captured.args, captured.kwargs or {}))
                try:
                    pending = observe(module(*args, **kwargs), "out", self.session.digester)
                except DetauditError:
                    raise
                except Exception:  # it needs what its parents set up: that is an answer, too
                    return None
                self.session.digester.finish()
                outputs.add(pending.resolve()[0])
        return len(outputs) > 1


def _made_around(maker: OperatorDifference, origin: Origin) -> bool:
    return maker.module != origin.module and is_within(origin.module, maker.module)


def find_call(execution: Execution, key: CallKey) -> Call | None:
    return next((c for c in execution.run.calls if (c.module, c.ordinal) == key), None)


def numbers_of(a: Tensors, b: Tensors) -> Numbers:
    """Numbers over the output tensors of two captures of one call."""
    other = dict(b)
    pairs = [
        (tensor, other[site])
        for site, tensor in a
        if site in other and tensor.shape == other[site].shape and tensor.dtype == other[site].dtype
    ]
    numbers = combine(difference(left, right) for left, right in pairs)
    return replace(numbers, order_only=numbers.reason is None and all(starmap(_same_rows, pairs)))


def _same_rows(a: Tensor, b: Tensor) -> bool:
    """Whether both hold the same rows, in whatever order; rows shorter than a leaf are not told apart."""
    left, right = digest(a), digest(b)
    if left.leaves is None or right.leaves is None or a.dim() < 2:
        return left == right
    leaves = (sorted(memoryview(leaves).cast("Q")) for leaves in (left.leaves, right.leaves))
    return next(leaves) == next(leaves)


def combine(differences: Iterable[Difference]) -> Numbers:
    """One set of numbers for several tensors: the largest, and histograms added up."""
    found = [item for item in differences if item.elements_differing]
    if not found:
        return Numbers(reason="what differs is not in the tensors it returned (shape, dtype or state)")
    histogram: dict[str, int] = {}
    for item in found:
        for bucket, count in (item.ulp_histogram or {}).items():
            histogram[bucket] = histogram.get(bucket, 0) + count
    return Numbers(
        max_ulp=max((item.max_ulp for item in found if item.max_ulp is not None), default=None),
        max_abs=max((item.max_abs for item in found if item.max_abs is not None), default=None),
        value_equal=all(item.value_equal for item in found),
        ulp_histogram=histogram or None,
        has_nan=any(item.has_nan for item in found),
    )


def _noticed(origin: Origin, numbers: Numbers, operator: OperatorDifference | None) -> list[Finding]:
    module = origin.module
    found: list[Finding] = []
    if numbers.has_nan:
        found.append(Finding("nan", module, "its outputs hold NaN"))
    if numbers.value_equal:
        message = "its outputs differ in bits and are equal as values (signed zeros, NaN payloads)"
        found.append(Finding("value-equal", module, message))
    if numbers.order_only:
        message = "its outputs hold the same rows in another order: something collects without a fixed order"
        found.append(Finding("order-only", module, message))
    if operator is not None and operator.kind == "unwritten":
        message = (
            f"{operator.operator} inside it reads {', '.join(operator.sites)}, which differs where nothing "
            "has been written: memory made inside the module, with what it held before"
        )
        found.append(Finding("uninitialised-memory", module, message))
    return found


def tensors_of(output: object) -> Tensors:
    """Plain tensors reachable in an output, by site."""
    found: Tensors = []
    for site, leaf in flatten(output, "out"):
        if isinstance(leaf, Tensor):
            with contextlib.suppress(NotObservable):
                found += [(site + suffix, part) for suffix, part in parts(leaf)]
    return found


@dataclass(frozen=True, slots=True)
class Kept:
    """A captured call as one process hands it to another. ``inputs`` and ``output`` tell records apart."""

    inputs: str
    output: str
    tensors: Tensors
    reason: str | None = None


def keep(execution: Execution) -> dict[CallKey, Kept]:
    """The captured calls of one execution."""
    kept: dict[CallKey, Kept] = {}
    for key, captured in execution.captured.items():
        call = find_call(execution, key)
        if call is None or captured.reason is not None:
            kept[key] = Kept("", "", [], captured.reason or "the call did not happen again")
        else:
            tensors = tensors_of(captured.output)
            kept[key] = Kept(_fingerprint(entered_with(call)), _fingerprint(call.out), tensors)
    return kept


def entered_with(call: Call) -> Record:
    """Arguments and own state, but for host scalars in attributes: a counter of calls never agrees."""
    return (*call.args, *_uncounted(call.state))


def _uncounted(record: Record) -> Record:
    return tuple(
        (site, value)
        for site, value in record
        if not (site.startswith("attr.") and value.dtype.startswith(SCALAR_PREFIX))
    )


def _fingerprint(record: Record) -> str:
    return xxhash.xxh3_128_hexdigest(repr(record).encode())


def _agree(a: Execution, b: Execution, origins: Sequence[CallKey]) -> bool:
    """Whether two runs agree in their final output and in every call that does not lie in an origin."""
    if a.run.records.get("final") != b.run.records.get("final") or len(a.run.calls) != len(b.run.calls):
        return False
    held = {module for module, _ in origins}
    return all(
        (entered_with(x), _uncounted(x.out)) == (entered_with(y), _uncounted(y.out))
        for x, y in zip(a.run.calls, b.run.calls, strict=True)
        if not any(is_within(x.module, module) for module in held)
    )
