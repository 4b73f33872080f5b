"""The sentences that all reporters share: rates, rows, sizes, settings. Plain text, no layout.

With no difference seen, none of them says "clean": they name the number of comparisons, the bound and
the conditions it covers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detaudit.core.mechanisms import mechanism
from detaudit.core.records import Condition, KernelReport, Origin, Report, VariantResult

ROOT = "(root)"
ENGINES: Mapping[str, str] = {
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "reference": "reference kernel",
}
"""Keys of ``KernelReport.recommended`` that name a library, with the library's own spelling."""


def module_name(path: str) -> str:
    """A module path as shown: the root has an empty path and still needs a name."""
    return path or ROOT


def count(number: int, noun: str) -> str:
    """``1 run``, ``1,024 rows``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def upper_percent(share: float) -> str:
    """A share between 0 and 1 as a percentage, rounded up: a bound must stay a bound."""
    percent = 100 * share
    digits = max(1, -math.floor(math.log10(percent))) if 0 < percent < 1 else 1
    scale = 10**digits
    # The tiny step down keeps 1.0 from becoming 1.1 through binary rounding.
    return f"{math.ceil(percent * scale - 1e-9) / scale:.{digits}f}%"


def row_ranges(rows: Sequence[int], limit: int = 6) -> str:
    """Sorted row numbers with neighbours joined, at most ``limit`` groups: ``0-41, 57, ...``."""
    groups: list[tuple[int, int]] = []
    for row in rows:
        if groups and row == groups[-1][1] + 1:
            groups[-1] = (groups[-1][0], row)
        else:
            groups.append((row, row))
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in groups[:limit]]
    return ", ".join([*shown, "..."] if len(groups) > limit else shown)


def rows_of(origin: Origin) -> str:
    """Which rows of an origin's output differ; empty where that is not known."""
    total = origin.rows_total
    if not origin.rows or total is None:
        return ""
    if origin.rows_differing >= total:
        return "its only row" if total == 1 else f"all {total:,} rows"
    # The list of rows is cut at 4,096, the count is not.
    cut = ", ..." if origin.rows_differing > len(origin.rows) and len(origin.rows) > 1 else ""
    noun = "row" if origin.rows_differing == 1 else "rows"
    listed = row_ranges(origin.rows)
    return f"{noun} {listed}{'' if listed.endswith('...') else cut} of {total:,}"


def size_of(max_ulp: int | None, max_abs: float | None) -> str:
    """The largest differences, not always of one element: ``up to 1.2e-07 (3 ULP)``, or empty."""
    absolute = "" if max_abs is None else f"{max_abs:.2g}"
    ulps = "" if max_ulp is None else f"{max_ulp:,} ULP"
    both = f"{absolute} ({ulps})" if absolute and ulps else absolute or ulps
    return both and f"up to {both}"


def origin_line(origin: Origin, report: Report) -> str:
    """One line: which call, how often, which rows, how far."""
    facts = [
        f"{origin_rate(origin, report)} differ",
        rows_of(origin),
        size_of(origin.max_ulp, origin.max_abs),
    ]
    if origin.value_equal:
        facts.append("equal in value, different in bits")
    return (
        f"{module_name(origin.module)} ({origin.cls}), {calls_of(origin)}: {', '.join(filter(None, facts))}"
    )


def origin_rate(origin: Origin, report: Report) -> str:
    """``18 of 19 runs``: one of the runs is the reference, so one less than there were."""
    compared = report.rate.comparisons if origin.comparisons is None else origin.comparisons
    return f"{origin.runs_differing:,} of {count(compared, 'run')}"


def calls_of(origin: Origin) -> str:
    """``call 0``, or ``call 0 and 3 more of its calls``."""
    more = f" and {origin.calls - 1:,} more of its calls" if origin.calls > 1 else ""
    return f"call {origin.call:,}{more}"


def _meaning(condition: str) -> str:
    held = condition.startswith("held-fixed")
    return ": with the outputs of the origins above held fixed" if held else ""


def origin_details(origin: Origin) -> list[str]:
    """What else is known of an origin, a line each."""
    lines = []
    if origin.part == "own-code":
        after = f", after {origin.after}" if origin.after else ""
        lines.append(f"in the module's own code, not in a child{after}")
    if origin.condition is not None:
        lines.append(f"found under the condition {origin.condition}{_meaning(origin.condition)}")
    lines.append(f"differs at {', '.join(origin.sites[:4])}{', ...' if len(origin.sites) > 4 else ''}")
    if origin.operator:
        lines.append(f"operator: {origin.operator}")
    if origin.mechanism:
        lines.append(f"why: {origin.mechanism}")
    if origin.operator and mechanism(origin.operator):
        lines.append(
            "to avoid it: torch.use_deterministic_algorithms(True), or an error where torch has no way"
        )
    if origin.isolated is not None:
        lines.append(
            f"alone, on its captured inputs, it {'differs too' if origin.isolated else 'does not differ'}"
        )
    if origin.healed is not None:
        rest = "everything else agrees" if origin.healed else "something else still differs"
        lines.append(f"with the output of every origin held fixed, {rest}")
    if origin.ulp_histogram:
        lines.append(f"elements that differ, by ULPs: {ulp_counts(origin.ulp_histogram)}")
    if origin.max_ulp is None and origin.max_abs is None and origin.numbers_reason:
        lines.append(f"size not measured: {origin.numbers_reason}")
    return lines


def ulp_counts(histogram: Mapping[str, int], most: int = 3) -> str:
    """``522 by 1, 40 by 2 to 3, 7 by 4 or more``; a key is the lower end of a power-of-two range."""
    powers = sorted((int(key), number) for key, number in histogram.items() if key.isdigit() and key != "0")
    listed = [
        f"{number:,} by {key if key == 1 else f'{key:,} to {2 * key - 1:,}'}" for key, number in powers[:most]
    ]
    if powers[most:]:
        listed.append(f"{sum(number for _, number in powers[most:]):,} by {powers[most][0]:,} or more")
    for key, words in (("0", "equal in value"), ("nan", "NaN on one side")):
        if histogram.get(key):
            listed.append(f"{histogram[key]:,} {words}")
    return ", ".join(listed)


def rate_line(report: Report) -> str:
    """How often the run differs, or the bound that "no difference" stands for."""
    rate = report.rate
    if report.verdict == "inconclusive":
        return f"{report.coverage.get('reason') or 'nothing was compared'}, so nothing was shown"
    if rate.comparisons == 0:
        return "the runs that differ were not compared call by call"
    confidence = f"{100 * rate.confidence:g}%"
    if not rate.estimate:
        bound = f"at most {upper_percent(rate.high)} of runs differ ({confidence} one-sided)"
        return f"no difference in {count(rate.comparisons, 'comparison')}; {bound}, under these conditions"
    interval = f"{confidence} interval {100 * rate.low:.1f}% to {100 * rate.high:.1f}%"
    return f"{100 * rate.estimate:.1f}% of {count(rate.comparisons, 'comparison')} differ ({interval})"


def outputs_line(report: Report) -> str:
    """How the final outputs spread: distinct ones, and the share of the most common."""
    if report.distinct_outputs == 0:
        return "no final output was compared"
    if report.verdict == "inconclusive":
        return f"{count(report.distinct_outputs, 'distinct final output')} in {count(report.runs, 'run')}"
    if report.distinct_outputs == 1:
        return f"the same final output in all {count(report.runs, 'run')}"
    share = f"the most common one in {100 * report.modal_share:.1f}% of runs"
    return (
        f"{count(report.distinct_outputs, 'distinct final output')} in {count(report.runs, 'run')}, {share}"
    )


def conditions_line(report: Report) -> str:
    """``in-process: 20 runs, 18 differ; hooks-off: ...``."""
    return "; ".join(f"{c.name}: {count(c.runs, 'run')}, {_condition_result(c)}" for c in report.conditions)


def _condition_result(condition: Condition) -> str:
    if condition.runs_differing:
        return f"{condition.runs_differing:,} differ{'s' if condition.runs_differing == 1 else ''}"
    return "none differs" if condition.verdict == "deterministic" else "nothing shown"


def settings(values: Mapping[str, Any]) -> str:
    """``use_fused_finalize=False, tactic=63``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def plain(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, Mapping):
        return settings(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unknown" if value is None else str(value)


def recommended_setting(kernel: KernelReport) -> str:
    """``unfused: use_fused_finalize=False, 1.02 times the median time ...``; empty when there is none."""
    found = kernel.recommended or {}
    named = ": ".join(filter(None, (str(found.get("variant", "")), plain(found.get("settings") or ""))))
    return ", ".join(filter(None, (named, str(found.get("cost", "")))))


def recommendation(kernel: KernelReport) -> list[tuple[str, str]]:
    """(library or engine, what to set there) pairs of the recommended setting."""
    found = kernel.recommended or {}
    return [(label, plain(found[key])) for key, label in ENGINES.items() if found.get(key)]


def recommendation_warnings(kernel: KernelReport) -> list[str]:
    return [plain(warning) for warning in (kernel.recommended or {}).get("warnings") or ()]


def differing(variant: VariantResult) -> str:
    """``29/300``, or ``not run``."""
    return f"{variant.runs_differing:,}/{variant.runs:,}" if variant.runs else "not run"


def variant_cells(variant: VariantResult) -> tuple[list[str], list[str]]:
    """(name, settings, tactic) and (runs that differ, bound, ULP, relative error, median ms, ratio)."""
    head = [variant.name, settings(variant.settings), variant.tactic or "-"]
    if not variant.runs:
        return head, [differing(variant), "-", "-", "-", "-", "-"]
    return head, [
        differing(variant),
        upper_percent(variant.bound),
        _number(variant.max_ulp, ",d"),
        _number(variant.rel_error, ".3g"),
        _number(variant.median_ms, ".4f"),
        "-" if variant.ratio is None else f"{variant.ratio:.2f}x",
    ]


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def next_commands(report: Report) -> list[str]:
    """What to type next, given what was found."""
    target, trace = shlex.quote(report.target or "TARGET"), shlex.quote(report.trace or "TRACE")
    arguments = "".join(f" {shlex.quote(word)}" for word in report.arguments)
    if report.verdict == "nondeterministic":
        captured = bool(report.kernels) or any(origin.operator for origin in report.origins)
        repro = [f"detaudit repro {trace}"] if captured else []
        return [*repro, f"detaudit report {trace} --format markdown --output report.md"]
    if report.verdict == "deterministic":
        more = max(300, 10 * report.runs)
        return [f"detaudit run {target} --runs {more}{arguments}"]
    return [f"detaudit run {target}{arguments}", "detaudit doctor"]


def joined(items: Iterable[str], limit: int = 12) -> str:
    """Items separated by commas, at most ``limit`` of them."""
    listed = list(items)
    more = [f"and {len(listed) - limit:,} more"] if len(listed) > limit else []
    return ", ".join(listed[:limit] + more)


def reach(kernel: KernelReport) -> str | None:
    """What rerunning the kernel could not have shown."""
    if kernel.backend != "reference" or not kernel.variants:
        return None
    return (
        "detaudit's own kernel in plain torch, on this device: nothing is shown of any library's GPU kernel"
    )
