"""Which operator inside an origin differs, and what it says of the origin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from detaudit.compare.classes import is_within
from detaudit.core.mechanisms import mechanism
from detaudit.core.recording import CallKey
from detaudit.core.records import Origin
from detaudit.execution import Session
from detaudit.hooks.operators import Operator, OperatorDifference, OperatorTap, first_differing, within


@dataclass(frozen=True, slots=True)
class OperatorSearch:
    """Runs a session under operator taps.

    Args:
        run: makes one run, with the options of ``Session.execute``.
        attempts: most runs spent on one question.
    """

    session: Session
    run: Callable[..., object]
    attempts: int

    def inside(self, origin: Origin, substitute: Mapping[CallKey, Any]) -> OperatorDifference | None:
        """The first operator inside the origin that differs, those of modules held fixed in it left out."""
        held = {m for m, _ in substitute if m != origin.module and is_within(m, origin.module)}

        def kept(op: Operator) -> bool:
            return (op.call == origin.call or op.module != origin.module) and not _is_in(op.module, held)

        return next((found for found, _ in self._differences(origin.module, substitute, kept)), None)

    def before(
        self, reader: OperatorDifference, substitute: Mapping[CallKey, Any]
    ) -> OperatorDifference | None:
        """The operator anywhere in the model that made what ``reader`` was given.

        That is the first one that was given equal inputs and made different outputs, where it ran before
        ``reader``, whose memory was made by operators of the run's own thread. Modules of which the output is
        substituted are passed over: what differs inside them is not handed on.
        """
        held = {module for module, _ in substitute}
        for found, operators in self._differences("", substitute, lambda op: not _is_in(op.module, held)):
            if found.kind == "outputs":
                return found if _made_before(found, reader, operators) else None
        return None

    def _differences(
        self, module: str, substitute: Mapping[CallKey, Any], kept: Callable[[Operator], bool]
    ) -> Iterator[tuple[OperatorDifference, list[Operator]]]:
        """The first operator that differs between the first run and each later one, with the first's own."""
        first: list[Operator] | None = None
        for _ in range(self.attempts):
            operators = [op for op in self._operators(module, substitute) if kept(op)]
            if first is None:
                first = operators
            elif (found := first_differing(first, operators)) is not None:
                yield found, first

    def _operators(self, module: str, substitute: Mapping[CallKey, Any]) -> list[Operator]:
        tap = OperatorTap(self.session.digester, within(self.session.recorder.current_call, [module]))
        self.run(around=tap, substitute=substitute)
        return tap.operators()


def _is_in(module: str, containers: Collection[str]) -> bool:
    return any(is_within(module, container) for container in containers)


def _made_before(made: OperatorDifference, reader: OperatorDifference, operators: list[Operator]) -> bool:
    places = {(op.module, op.call, op.index): position for position, op in enumerate(operators)}
    before = places.get((made.module, made.call, made.index))
    after = places.get((reader.module, reader.call, reader.index))
    if before is None or after is None or before >= after:
        return False
    return set(reader.sites) <= operators[after].made


def explanation(operator: OperatorDifference, maker: OperatorDifference | None = None) -> str | None:
    """One line on why the origin differs.

    Args:
        operator: the first operator inside it that differs.
        maker: the operator elsewhere that made what ``operator`` was given, where one is known.
    """
    name, sites = operator.operator, ", ".join(operator.sites)
    match operator.kind:
        case "outputs":
            return mechanism(name)
        case "host":
            return (
                f"{name} is given host values that differ ({sites}): a clock, an address, the order of a "
                "set, or a generator that was not put back"
            )
        case "changed":
            return (
                f"{name} reads {sites}, which an operator inside the module made and something else then "
                "wrote to: a kernel that torch's dispatcher does not see, or another thread"
            )
        case "inputs" if maker is not None:
            return (
                f"{name} reads {sites}, which differs, was handed to the module other than through its "
                f"arguments and own state, and was made by {maker.operator} in "
                f"{maker.module or 'the root'} (call {maker.call})"
            )
        case "inputs":
            return (
                f"{name} reads {sites}, which differs and whose origin was not seen: it came from outside "
                "the module other than through its arguments, parameters or buffers (a global, a closure, a "
                "swapped parameter, data from outside torch), or was made by another thread"
            )
    return None
