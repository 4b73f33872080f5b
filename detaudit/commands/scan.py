"""``detaudit scan``: read from the machine code which kernels can differ."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from detaudit.commands.delivery import STDOUT, check, deliver
from detaudit.core.errors import (
    EXIT_INCONCLUSIVE,
    EXIT_NONDETERMINISTIC,
    TraceUnreadable,
    TraceVersion,
    UsageError,
)
from detaudit.reporters.json import write_json

if TYPE_CHECKING:
    from detaudit.core.scans import KernelScan, ScanReport

FORMATS = ("terminal", "json", "sarif")


@dataclass(frozen=True, slots=True)
class Request:
    """The command line of ``detaudit scan``."""

    paths: tuple[Path, ...]
    packages: tuple[str, ...]
    archs: tuple[str, ...]
    kernels: tuple[str, ...]
    against: Path | None
    target: str | None
    audit: Path | None
    format_: str
    output: Path | None
    everything: bool
    jobs: int
    no_cache: bool
    exit_code: bool


@click.command()
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME",
    help="An installed package, with what it compiled here.",
)
@click.option(
    "--sm",
    "archs",
    multiple=True,
    metavar="NUMBER",
    help="Only this architecture, such as 90 or 120a.  [default: all]",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="GLOB",
    help="Only kernels whose name matches, such as '*index_add*'.",
)
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare with the suspects of a lock file, or of an earlier scan in JSON.",
)
@click.option(
    "--run",
    "target",
    metavar="TARGET",
    help="Run this target once on the GPU and scan what its modules launch.",
)
@click.option(
    "--audit",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="With --run: the trace of an audit, whose origins are looked at first.",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    default="terminal",
    show_default=True,
    help="How to show it.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write to this file instead of the terminal.")
@click.option("--all", "everything", is_flag=True, help="List kernels in which nothing was found too.")
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Disassemble this many images at a time.  [default: one per CPU]",
)
@click.option("--no-cache", is_flag=True, help="Neither use nor keep earlier results.")
@click.option("--exit-code", is_flag=True, help="End with 1 if there are suspects.")
def command(**options: object) -> int:
    """Read from the machine code which kernels can differ, also for GPUs that are not here.

    PATH is a shared library, object file, archive, cubin, fatbin, or a folder of them, such as Triton's
    cache. Of every kernel it says whether it can accumulate floating-point values in the order in which
    threads arrive. No GPU is needed, only NVIDIA's disassembler: pip install 'detaudit[scan]'.

    With --run the target is run on the GPU, and each module is told what the kernels that it launched can
    do: an origin without a suspect points at a race or at memory, a suspect elsewhere is a risk.

    \b
    Ends with
      0  it could scan; with --against also: no new suspects
      1  with --against: there are new suspects; with --exit-code: there are suspects
      3  no machine code was found, or none of it could be read

    \b
    Example:
      detaudit scan fused_moe_90.so
      detaudit scan ~/.triton/cache --all
      detaudit scan --package torch --sm 90 --kernel '*index*'
      detaudit scan --package flashinfer --format json --output suspects.json
      detaudit scan --package flashinfer --against suspects.json
      detaudit scan --run model.py --audit model.detaudit
    """
    request = Request(**options)  # type: ignore[arg-type]
    _check(request)
    check(request.output, *request.paths, request.against, request.audit)
    if request.target is not None:
        return _launched(request, request.target)
    new_against = _lock(request.against) if request.against else None
    report = _scanned(request)
    new: Sequence[KernelScan] | None = None
    if new_against is not None:
        from detaudit.scan.suspects import new_suspects

        try:
            new = new_suspects(report, new_against)
        except (TraceUnreadable, TraceVersion) as error:
            raise type(error)(f"{request.against}: {error}") from error
    deliver(lambda stream: _render(request, report, new, stream), request.output or STDOUT)
    return _code(request, report, new)


def _check(request: Request) -> None:
    for arch in request.archs:
        if not re.fullmatch(r"(sm_)?\d+[af]?", arch):
            raise UsageError(f"--sm {arch!r} is no architecture; give a number such as 90 or 120a")
    if request.target is not None:
        if request.paths or request.packages or request.against or request.format_ == "sarif":
            raise UsageError(
                "--run scans what the target loads; leave PATH, --package, --against and sarif out"
            )
    elif request.audit is not None:
        raise UsageError("--audit goes with --run TARGET; see 'detaudit scan --help'")
    elif not request.paths and not request.packages:
        raise UsageError("give a PATH, --package NAME or --run TARGET; see 'detaudit scan --help'")


def _launched(request: Request, target: str) -> int:
    from detaudit.launched import launched_by
    from detaudit.reporters.progress import progress
    from detaudit.target import resolve

    origins = _origins(request.audit) if request.audit else None
    with progress(None, "preparing") as bar:
        report = launched_by(resolve(target), origins, bar, request.jobs)
    if request.format_ == "json":
        deliver(lambda stream: write_json(report.to_json(), stream), request.output or STDOUT)
    else:
        from detaudit.reporters.scan_launches import render_launches

        deliver(
            lambda stream: render_launches(report, stream, everything=request.everything),
            request.output or STDOUT,
        )
    found = any(module.suspects for module in report.modules)
    return EXIT_NONDETERMINISTIC if request.exit_code and found else 0


def _origins(path: Path) -> tuple[str, ...]:
    from detaudit.core.records import Report
    from detaudit.trace import open_trace

    with open_trace(path) as trace:
        stored = trace.report()
    if stored is None:
        raise TraceUnreadable(f"{path} holds no analysis; finish the audit, or run 'detaudit report' on it")
    return tuple(origin.module for origin in Report.from_json(stored).origins)


def _scanned(request: Request) -> ScanReport:
    from detaudit.reporters.progress import progress
    from detaudit.scan.cache import cache_folder
    from detaudit.scan.scanner import Settings, plan, scan
    from detaudit.scan.selection import Selection
    from detaudit.scan.sources import files_of
    from detaudit.scan.tools import find_tools

    tools = find_tools()
    files = files_of(request.paths, request.packages)
    check(request.output, *files)
    work = plan(files, request.paths)
    settings = Settings(
        tuple(arch.removeprefix("sm_") for arch in request.archs),
        Selection(request.kernels),
        request.jobs,
        None if request.no_cache else cache_folder(),
    )
    with progress(len(work.images), "disassembling") as bar:
        return scan(work, tools, settings, bar.advance)


def _lock(path: Path) -> dict[str, object]:
    try:
        lock = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}; give a lock file, or a scan in JSON"
        ) from error
    except ValueError as error:
        raise TraceUnreadable(f"{path} is not JSON ({error}); write it again") from error
    if not isinstance(lock, dict):
        raise TraceUnreadable(f"{path} is neither a lock file nor a scan; write it again")
    return lock


def _render(request: Request, report: ScanReport, new: Sequence[KernelScan] | None, stream: IO[str]) -> None:
    if request.format_ == "json":
        data = report.to_json()
        if new is not None:
            data["new_suspects"] = [kernel.name for kernel in new]
        write_json(data, stream)
    elif request.format_ == "sarif":
        from detaudit.reporters.scan_sarif import render_sarif

        render_sarif(report, stream)
    else:
        from detaudit.reporters.scan_terminal import render_scan

        render_scan(report, stream, everything=request.everything, new=new)


def _code(request: Request, report: ScanReport, new: Sequence[KernelScan] | None) -> int:
    if new or (request.exit_code and report.suspects):
        return EXIT_NONDETERMINISTIC
    return 0 if any(file.functions for file in report.files) else EXIT_INCONCLUSIVE
