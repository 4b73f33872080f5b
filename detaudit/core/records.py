"""The report: verdict, origins, findings, kernels. Frozen, JSON in and out; never imports torch.

The JSON form is ``format: "detaudit-report"``, ``version: 1``. Fields may be added within a version.
History: 1, first version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from detaudit.core.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NONDETERMINISTIC,
    EXIT_STABLE,
    TraceUnreadable,
    TraceVersion,
)

FORMAT = "detaudit-report"
VERSION = 1
KERNELS_FORMAT = "detaudit-kernels"
KERNELS_VERSION = 1

Verdict = Literal["deterministic", "nondeterministic", "inconclusive"]
Outcome = Literal["confirmed", "not-reproduced", "vacuous-control", "unsupported"]
FindingKind = Literal[
    "rng-consumed",
    "stateful",
    "history-dependent",
    "mutates-input",
    "inputs-differ",
    "uninitialised-memory",
    "dirty-output-buffer",
    "order-only",
    "value-equal",
    "batch-variant",
    "control-flow",
    "unobserved-producer",
    "unobserved-output",
    "observer-effect",
    "masked",
    "first-run-differs",
    "fused-not-run",
    "nan",
]
FINDING_KINDS: tuple[str, ...] = get_args(FindingKind)

EXIT_CODES: Mapping[str, int] = {
    "deterministic": EXIT_STABLE,
    "nondeterministic": EXIT_NONDETERMINISTIC,
    "inconclusive": EXIT_INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """Share of comparisons that differ: estimate and Clopper-Pearson interval.

    With no difference in n comparisons ``high`` is the one-sided bound 1 - 0.05^(1/n). ``estimate`` is
    ``None`` (and the interval 0 to 1) where nothing was compared.
    """

    estimate: float | None
    low: float
    high: float
    comparisons: int
    confidence: float = 0.95


@dataclass(frozen=True, slots=True)
class Origin:
    """A source of nondeterminism with no source inside it.

    Args:
        module: path in ``named_modules()``; the root is the empty string.
        cls: class name (``class`` in JSON).
        call: ordinal of the module's call; of the first one where several are origins (``calls`` of them).
        part: ``module``, or ``own-code`` of a container none of whose observed children is a source.
        after: path of the last child call that agrees, for ``own-code``.
        sites: the outputs that differ.
        runs_differing: runs whose output differs from the most common output for the same inputs.
        rows: differing rows of the first differing site (indices over all but its last dimension), at most
            4,096 of them; ``rows_differing`` counts all, ``rows_total`` is the number of rows.
        max_ulp, max_abs, value_equal: from the capture pass; ``None`` with ``numbers_reason`` saying why.
        operator: the operator inside the module that differs for equal inputs, where one was found.
        mechanism: one line on why it can differ, where known.
        isolated: whether the module alone, rerun on its captured inputs, differs; ``None`` if not tried.
        healed: whether everything else agrees once the outputs of all origins are held fixed; ``None`` if not
            tried.
        calls: how many calls of the module are origins.
        condition: where it was found, if not in the main runs; in ``held-fixed-1`` the outputs of origins
            found before it were held fixed. ``comparisons``: how many there were; ``None``: the report's.
    """

    module: str
    cls: str
    call: int
    part: Literal["module", "own-code"]
    after: str | None
    sites: tuple[str, ...]
    runs_differing: int
    rows: tuple[int, ...] = ()
    rows_differing: int = 0
    rows_total: int | None = None
    max_ulp: int | None = None
    max_abs: float | None = None
    value_equal: bool | None = None
    numbers_reason: str | None = None
    ulp_histogram: Mapping[str, int] | None = None
    operator: str | None = None
    mechanism: str | None = None
    isolated: bool | None = None
    healed: bool | None = None
    calls: int = 1
    condition: str | None = None
    comparisons: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Anything worth telling that is not an origin; ``docs`` is ``docs/findings.md#<kind>``."""

    kind: FindingKind
    module: str | None
    message: str
    docs: str = ""

    def __post_init__(self) -> None:
        if self.kind not in FINDING_KINDS:
            raise ValueError(f"unknown finding kind {self.kind!r}")
        if not self.docs:
            object.__setattr__(self, "docs", f"docs/findings.md#{self.kind}")


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One kernel configuration, run ``runs`` times against its own first output.

    ``bound``: one-sided 95% upper bound on the rate. ``rel_error``: ||y - ref|| / ||ref|| against fp64.
    ``median_ms``: milliseconds. ``ratio``: of median to the default variant's in the same run.
    ``reason``: why it did not run, or did not finish. ``note``: what else the runs showed.
    ``digest``: root of the first output, in hex; variants with equal digests agree bit for bit.
    """

    name: str
    settings: Mapping[str, Any]
    tactic: str | None
    runs: int
    runs_differing: int
    distinct: int
    bound: float
    max_ulp: int | None
    max_abs: float | None
    rel_error: float | None
    median_ms: float | None
    ratio: float | None
    rows_differing: int = 0
    rows_total: int | None = None
    fused: bool | None = None
    can_fuse: bool | None = None
    reason: str | None = None
    note: str | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A kernel case rerun under variants.

    ``outcome_reason``: one sentence. ``control``, ``asked``: names of the variants that served as the
    positive control and that have the case's own settings.
    """

    case: str
    module: str | None
    backend: str
    outcome: Outcome
    outcome_reason: str
    recommended: Mapping[str, Any] | None
    variants: tuple[VariantResult, ...] = ()
    control: str | None = None
    asked: str | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    name: str
    runs: int
    runs_differing: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to one audit.

    A verdict and its evidence are checked together: ``deterministic`` needs at least one comparison and
    no origins, ``nondeterministic`` needs a difference. ``arguments``: what follows ``detaudit run TARGET``
    to make this audit again, but for the number of runs.
    """

    verdict: Verdict
    runs: int
    runs_differing: int
    distinct_outputs: int
    modal_share: float
    rate: Rate
    origins: tuple[Origin, ...] = ()
    findings: tuple[Finding, ...] = ()
    kernels: tuple[KernelReport, ...] = ()
    conditions: tuple[Condition, ...] = ()
    observer: Mapping[str, Any] = field(default_factory=dict)
    restored: Mapping[str, Any] = field(default_factory=dict)
    coverage: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    trace: str = ""
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in EXIT_CODES:
            raise ValueError(f"unknown verdict {self.verdict!r}")
        if self.verdict == "deterministic" and (self.origins or self.rate.comparisons < 1):
            raise ValueError("a deterministic verdict needs comparisons and no origins")
        if self.verdict == "inconclusive" and self.origins:
            raise ValueError("an inconclusive verdict has no origins")

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible form, keys in the order of the design."""
        body = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        head = {
            "format": FORMAT,
            "version": VERSION,
            "verdict": body.pop("verdict"),
            "exit_code": self.exit_code,
        }
        return head | body

    @classmethod
    def from_json(cls, data: Any) -> Report:
        """Read ``to_json``'s form; unknown fields are passed over.

        Raises:
            TraceUnreadable: not a report. TraceVersion: a version this detaudit does not know.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceUnreadable(
                "this is not a detaudit report; expected JSON with format 'detaudit-report'"
            )
        if data.get("version") != VERSION:
            found = data.get("version")
            raise TraceVersion(
                f"the report has version {found!r}, this detaudit reads {VERSION}; upgrade detaudit"
            )
        try:
            values = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
            values["rate"] = _read(Rate, values["rate"])
            for name, item in _ITEMS.items():
                values[name] = tuple(_read(item, entry) for entry in values.get(name, ()))
            values["arguments"] = tuple(values.get("arguments", ()))
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceUnreadable(f"the report is damaged ({error}); run the audit again") from error


def kernels_json(kernels: Iterable[KernelReport], exit_code: int) -> dict[str, Any]:
    """What ``detaudit kernels --json`` writes: kernel reports without an audit around them."""
    head = {"format": KERNELS_FORMAT, "version": KERNELS_VERSION, "exit_code": exit_code}
    return head | {"kernels": [_plain(kernel) for kernel in kernels]}


_ITEMS: Mapping[str, type] = {
    "origins": Origin,
    "findings": Finding,
    "kernels": KernelReport,
    "conditions": Condition,
}
_RENAMED = {"cls": "class"}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            _RENAMED.get(f.name, f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _read(item: Any, data: Mapping[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(item):
        key = _RENAMED.get(f.name, f.name)
        if key in data:
            values[f.name] = tuple(data[key]) if isinstance(data[key], list) else data[key]
    if item is KernelReport:
        values["variants"] = tuple(_read(VariantResult, entry) for entry in data.get("variants", ()))
    return item(**values)
