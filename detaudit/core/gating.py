"""What a gate decided and why, and how two sets of bits differ. Plain data, JSON out; never imports torch.

The JSON form of ``GateResult`` is ``format: "detaudit-gate"``, ``version: 1``. Fields may be added within a
version. History: 1, first version.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from detaudit.core.errors import EXIT_ERROR, EXIT_INCONCLUSIVE, EXIT_NONDETERMINISTIC, EXIT_STABLE
from detaudit.core.records import Report

FORMAT = "detaudit-gate"
VERSION = 1

Status = Literal["passed", "failed", "error", "inconclusive"]
STATUSES: tuple[Status, ...] = get_args(Status)

CheckName = Literal[
    "audit",
    "evidence",
    "determinism",
    "bound",
    "conditions",
    "devices",
    "kernels",
    "budget",
    "baseline",
    "suspects",
]
CHECK_NAMES: tuple[CheckName, ...] = get_args(CheckName)

EXIT_CODES: dict[Status, int] = {
    "passed": EXIT_STABLE,
    "failed": EXIT_NONDETERMINISTIC,
    "error": EXIT_ERROR,
    "inconclusive": EXIT_INCONCLUSIVE,
}

Comparison = Literal["equal", "changed", "other-inputs", "unknown-environment", "absent", "nothing-stable"]


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """An entry of the environment, dotted (``gpu.driver``), with both values; ``None`` where it is absent."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before or 'absent'} -> {self.after or 'absent'}"


ChangeKind = Literal["outputs", "parameters", "state", "inputs", "calls", "final"]
_KINDS: dict[ChangeKind, str] = {
    "outputs": "other outputs for equal inputs",
    "parameters": "other outputs for equal inputs, and its parameters are other ones",
    "state": "other outputs for equal inputs, and its buffers, attributes or generators are other ones",
    "inputs": "the first that differs, and so do its inputs: what changed lies between recorded calls",
    "calls": "called on one side only",
}


@dataclass(frozen=True, slots=True)
class Change:
    """The first call in order of execution whose bits changed.

    Args:
        module, cls, call: which one; the root's path is empty. ``cls`` is empty where it is not known.
        kind: ``outputs``: equal arguments, other outputs; ``parameters``: so too, and parameters of the
            module differ; ``state``: so too, and its buffers or attributes, or generator states, do;
            ``inputs``: no call has equal arguments and other outputs, and this is the first that differs at
            all; ``calls``: one side lacks this call; ``final``: only the final output differs.
        modules: how many modules differ in all, what follows from the first included.
    """

    module: str
    cls: str
    call: int
    kind: ChangeKind
    modules: int = 1

    def __str__(self) -> str:
        """``layers.0.mlp (MLP), call 0: other outputs for equal inputs; 5 modules differ in all``."""
        if self.kind == "final":
            return "only the final output differs, in no recorded call"
        name = f"{self.module or '(root)'}{f' ({self.cls})' if self.cls else ''}, call {self.call}"
        more = f"; {self.modules} modules differ in all" if self.modules > 1 else ""
        return f"{name}: {_KINDS[self.kind]}{more}"


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """How the bits of a target compare with the lock file's.

    Args:
        environment: id of this environment, and ``against`` of the baseline that was compared (the
            nearest one where this one is not in the lock).
        bits_equal: whether the compared bits agree; ``None`` where none could be compared.
        conditions: what was compared. ``calls`` had stable bits on both sides, ``calls_varying`` had not.
    """

    comparison: Comparison
    environment: str
    against: str | None = None
    bits_equal: bool | None = None
    change: Change | None = None
    environment_changes: tuple[EnvironmentChange, ...] = ()
    conditions: tuple[str, ...] = ()
    calls: int = 0
    calls_varying: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the policy asks for, and how it went; ``module`` where it is about one."""

    name: CheckName
    status: Status
    message: str
    module: str | None = None


@dataclass(frozen=True, slots=True)
class TargetResult:
    """What was decided on one target.

    Args:
        name: as in the policy and the lock. ``file``: what annotations point at, relative to the repository.
        notes: worth telling, without influence on the status.
    """

    name: str
    file: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    report: Report | None = None
    baseline: BaselineResult | None = None
    trace: str = ""
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        return worst(tuple(check.status for check in self.checks))


@dataclass(frozen=True, slots=True)
class GateResult:
    """What was decided in all. Nothing examined is nothing shown, hence never a pass."""

    targets: tuple[TargetResult, ...]
    policy: str = ""
    lock: str = ""
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        return worst(tuple(target.status for target in self.targets))

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible form; reports in the form of ``Report.to_json``."""
        head = {"format": FORMAT, "version": VERSION, "status": self.status, "exit_code": self.exit_code}
        body = {"policy": self.policy, "lock": self.lock, "notes": list(self.notes)}
        return head | body | {"targets": [_target(target) for target in self.targets]}


def worst(statuses: tuple[Status, ...]) -> Status:
    """A failure outweighs an error, an error an inconclusive check; nothing at all is inconclusive."""
    for status in ("failed", "error", "inconclusive"):
        if status in statuses:
            return status
    return "passed" if statuses else "inconclusive"


def _target(target: TargetResult) -> dict[str, Any]:
    baseline = None if target.baseline is None else dataclasses.asdict(target.baseline)
    return {
        "name": target.name,
        "file": target.file,
        "status": target.status,
        "checks": [dataclasses.asdict(check) for check in target.checks],
        "notes": list(target.notes),
        "baseline": baseline,
        "trace": target.trace,
        "seconds": round(target.seconds, 3),
        "report": None if target.report is None else target.report.to_json(),
    }
