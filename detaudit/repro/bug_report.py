"""``REPORT.md``: what a maintainer of vLLM or FlashInfer asks for in a bug report, filled in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from detaudit.core.records import KernelReport
from detaudit.kernels.cases import Case
from detaudit.repro.choose import Finding
from detaudit.repro.shrink import elements
from detaudit.repro.trial import Trial

MEANING: Mapping[int | None, str] = {
    0: "all runs gave the same bits",
    1: "differs",
    2: "could not be run",
    3: "nothing was shown",
    None: "took too long",
}


def bug_report(
    finding: Finding, case: Case, trial: Trial, avoided: Trial, minimized_from: int | None = None
) -> str:
    """The page, in Markdown.

    Args:
        case: as it lies in the folder.
        trial, avoided: the script's own runs, as captured and with its switch.
        minimized_from: elements of the call as captured, where ``case`` is a smaller one; else None.
    """
    sections = (
        ("Your current environment", _environment(finding.report.environment)),
        ("Describe the bug", _description(finding)),
        ("Expected behaviour", _expected()),
        ("Steps to reproduce", _steps(finding, case, minimized_from)),
        ("Measured", _measured(finding, case, trial, avoided)),
        ("What avoids it", _avoid(finding, avoided)),
    )
    title = f"# {_call(finding)} gives different bits for identical inputs"
    return "\n\n".join([title, *(f"## {head}\n\n" + "\n".join(body) for head, body in sections)]) + "\n"


def _call(finding: Finding) -> str:
    return f"`{finding.entry.partition(':')[2]}`"


def _description(finding: Finding) -> Iterator[str]:
    origin, report = finding.origin, finding.report
    compared = report.rate.comparisons
    yield (
        f"Run twice on identical inputs and state, `{finding.module}` ({origin.cls}) of `{report.target}` is "
        f"given the same bits and returns different ones: in {origin.runs_differing} of {compared} "
        "comparisons."
    )
    if origin.operator:
        yield f"The operator inside it that differs is `{origin.operator}`" + (
            f": it {origin.mechanism}." if origin.mechanism else "."
        )
    if origin.max_abs is not None:
        ulps = f" ({origin.max_ulp:,} ULP)" if origin.max_ulp is not None else ""
        rows = f", in {origin.rows_differing:,} of {origin.rows_total:,} rows" if origin.rows_total else ""
        yield f"In the model, its outputs were up to {origin.max_abs:.3g}{ulps} apart{rows}."


def _expected() -> Iterator[str]:
    yield "The same bits on every run: inputs, weights, settings and random state are identical."


def _steps(finding: Finding, case: Case, minimized_from: int | None) -> Iterator[str]:
    if minimized_from is None:
        yield "The folder holds the captured arguments of one call, and a script that repeats it:"
    else:
        yield (
            f"The folder holds the arguments of one call, minimized from {minimized_from:,} to "
            f"{elements(case):,} elements while it still differed, and a script that repeats it:"
        )
    yield ""
    yield "```bash"
    yield f"pip install {' '.join(finding.kind.packages)}"
    yield "python repro.py          # exits 1: the bits differ"
    yield f"python repro.py {finding.kind.switch}"
    yield "```"


def _measured(finding: Finding, case: Case, trial: Trial, avoided: Trial) -> Iterator[str]:
    yield "By `repro.py`, compared with its first run:"
    yield ""
    head = (
        "setting",
        "runs that differ",
        "distinct outputs",
        "largest difference",
        "rows",
        "median ms",
        "exit",
    )
    yield from _table(head, [*_rows(trial, trial.results), *_rows(avoided, list(avoided.results)[-1:])])
    if avoided.code not in (0, 1):
        yield ""
        yield f"With `{finding.kind.switch}`: {MEANING.get(avoided.code, 'failed')} ({avoided.last_line})."
    yield ""
    yield "The arguments:"
    yield ""
    shapes = [
        (f"`{n}`", str(t.dtype).removeprefix("torch."), str(list(t.shape))) for n, t in case.tensors.items()
    ]
    yield from _table(("argument", "dtype", "shape"), shapes)
    if finding.kernel is not None and finding.kernel.variants:
        yield ""
        yield from _variants(finding.kernel)


def _rows(trial: Trial, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        found = trial.results[name]
        size = f"{found['max_abs']:.3g}" + (f" ({found['max_ulp']:,} ULP)" if found["max_ulp"] else "")
        yield (
            f"`{name}`",
            f"{found['differing']} of {found['runs']}"
            + ("" if found["differing"] else f" (at most {_percent(found)})"),
            str(found["distinct"]),
            size if found["differing"] else "0",
            f"{found['rows']:,} of {found['rows_total']:,}",
            f"{found['median_ms']:.3f}",
            str(trial.code),
        )


def _percent(found: Mapping[str, Any]) -> str:
    return f"{100 * found['bound']:.1f}%, 95% confidence"


def _variants(kernel: KernelReport) -> Iterator[str]:
    yield f"Under other settings, rerun by `detaudit`: {kernel.outcome}. {kernel.outcome_reason}."
    yield ""
    rows = [
        (
            v.name,
            v.tactic or "",
            f"{v.runs_differing} of {v.runs}" if v.runs else v.reason or "did not run",
            "" if v.max_abs is None else f"{v.max_abs:.3g}",
            "" if v.median_ms is None else f"{v.median_ms:.3f}",
        )
        for v in kernel.variants
    ]
    yield from _table(("variant", "tactic", "runs that differ", "largest difference", "median ms"), rows)


def _avoid(finding: Finding, avoided: Trial) -> Iterator[str]:
    shown = "which gave the same bits in every run above" if avoided.code == 0 else "not shown to help here"
    yield f"- `{finding.kind.avoid}` (`repro.py {finding.kind.switch}`), {shown}."
    recommended = finding.kernel.recommended if finding.kernel is not None else None
    for name, text in (recommended or {}).items():
        if isinstance(text, str) and name not in ("variant", "cost"):
            yield f"- {name}: {text}"
    if recommended and "cost" in recommended:
        yield f"- Its cost: {recommended['cost']}."


def _environment(environment: Mapping[str, Any]) -> Iterator[str]:
    gpu = environment.get("gpu") or {}
    facts = {
        "GPU": ", ".join(f"{d['name']} (SM{d['sm']}, {d['memory_gib']} GiB)" for d in gpu.get("devices", ()))
        or "none",
        "Driver": gpu.get("driver"),
        "CUDA of torch": (environment.get("torch") or {}).get("cuda"),
        "CPU": (environment.get("cpu") or {}).get("model"),
        "CPU threads": (environment.get("settings") or {}).get("threads"),
        "System": environment.get("system"),
        "Python": environment.get("python"),
        **(environment.get("versions") or {}),
    }
    yield from _table(("", ""), [(name, str(value)) for name, value in facts.items() if value is not None])
    yield ""
    yield "All of it, settings included, is in `environment.json`."


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for row in (head, tuple("---" for _ in head), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
