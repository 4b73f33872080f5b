"""The report as GitHub Markdown: for a bug report, or for a workflow's step summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO, Any

from detaudit.core.records import KernelReport, Report
from detaudit.reporters import evidence, wording

_SIGN = {"deterministic": "✅", "nondeterministic": "❌", "inconclusive": "⚠️"}


class MarkdownReporter:
    """Tables that GitHub renders; versions and settings folded away at the end."""

    def render(self, report: Report, stream: IO[str]) -> None:
        sections = [_summary(report), _origins(report), _findings(report)]
        sections += [_kernel(kernel) for kernel in report.kernels]
        sections += [_controls(report), _environment(report)]
        blocks = ["\n".join(lines) for lines in sections if lines]
        stream.write("\n\n".join(blocks) + "\n")


def cell(text: str) -> str:
    """Text safe inside a table cell: no pipe ends the cell, no line break the row."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Text as inline code, also where it holds backticks or the pipe of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: int = 0) -> list[str]:
    """A table whose last ``right`` columns are numbers."""
    rule = ["---"] * (len(header) - right) + ["--:"] * right
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]


def _summary(report: Report) -> list[str]:
    lines = [f"## {_SIGN[report.verdict]} {report.verdict} (exit code {report.exit_code})", ""]
    lines.append(f"{wording.rate_line(report)[:1].upper()}{wording.rate_line(report)[1:]}.")
    if report.rate.comparisons:
        lines.append(f"{wording.outputs_line(report).capitalize()}.")
    lines.append("")
    if report.target:
        lines.append(f"- Target: {code(report.target)}")
    if report.conditions:
        lines.append(f"- Conditions: {wording.conditions_line(report)}")
    if report.trace:
        lines.append(f"- Trace: {code(report.trace)}")
    return lines


def _origins(report: Report) -> list[str]:
    if not report.origins:
        return []
    rows = [
        [
            code(wording.module_name(o.module)),
            cell(o.cls),
            cell(wording.calls_of(o)).removeprefix("call "),
            cell(wording.origin_rate(o, report)).removesuffix(" runs"),
            cell(wording.rows_of(o)) or "-",
            cell(wording.size_of(o.max_ulp, o.max_abs)) or "not measured",
        ]
        for o in report.origins
    ]
    lines = ["### Where it starts", ""]
    lines += table(["module", "class", "call", "runs that differ", "rows", "largest difference"], rows)
    details = [(o, line) for o in report.origins for line in wording.origin_details(o)]
    return [*lines, "", *(f"- {code(wording.module_name(o.module))}: {cell(line)}" for o, line in details)]


def _findings(report: Report) -> list[str]:
    if not report.findings:
        return []
    lines = ["### Findings", ""]
    for finding in report.findings:
        where = "" if finding.module is None else f" in {code(wording.module_name(finding.module))}"
        lines.append(f"- **{finding.kind}**{where}: {cell(finding.message)} (see {finding.docs})")
    return lines


def _kernel(kernel: KernelReport) -> list[str]:
    where = "" if kernel.module is None else f" in {code(wording.module_name(kernel.module))}"
    lines = [f"### Kernel {code(kernel.case)}{where}", ""]
    lines.append(f"Backend {code(kernel.backend)}. **{kernel.outcome}**: {cell(kernel.outcome_reason)}")
    if reach := wording.reach(kernel):
        lines.append(f"This is {reach}.")
    if kernel.control:
        lines.append(f"Positive control: {cell(kernel.control)}.")
    if kernel.variants:
        header = [
            "variant",
            "settings",
            "tactic",
            "runs that differ",
            "bound",
            "ULP",
            "rel. error",
            "median ms",
            "ratio",
        ]
        lines += [
            "",
            *table(header, [_variant(kernel, index) for index in range(len(kernel.variants))], right=6),
        ]
    if kernel.recommended:
        lines += ["", f"To make it stable, use {cell(wording.recommended_setting(kernel))}.", ""]
        lines += [f"- {name}: {cell(value)}" for name, value in wording.recommendation(kernel)]
        lines += [f"- Warning: {cell(warning)}" for warning in wording.recommendation_warnings(kernel)]
    return lines


def _variant(kernel: KernelReport, index: int) -> list[str]:
    variant = kernel.variants[index]
    head, numbers = wording.variant_cells(variant)
    reason = f" ({variant.reason})" if variant.reason and not variant.runs else ""
    return [
        cell(head[0]),
        code(head[1]) if head[1] else "-",
        cell(head[2]),
        cell(numbers[0] + reason),
        *numbers[1:],
    ]


def _controls(report: Report) -> list[str]:
    done, missing = evidence.restored(report)
    unseen = evidence.unobserved(report.coverage)
    groups = {
        "Observer control": evidence.observer_lines(report.observer),
        "Put back before each run": done,
        "Not put back": missing,
        "Observed": evidence.coverage_lines(report),
        "Not observed": [*unseen[:10], *([f"{len(unseen) - 10:,} more"] if len(unseen) > 10 else [])],
    }
    lines = [f"- {title}: {cell('; '.join(items))}" for title, items in groups.items() if items]
    return ["### How it was made sure", "", *lines] if lines else []


def _environment(report: Report) -> list[str]:
    if not report.environment:
        return []
    rows = [[cell(name), code(value) if value else "-"] for name, value in _flat(report.environment)]
    summary = "<details><summary>Environment</summary>"
    return [summary, "", *table(["what", "value"], rows), "", "</details>"]


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, wording.plain(value))]
    return pairs
