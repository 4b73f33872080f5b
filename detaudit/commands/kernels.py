"""``detaudit kernels``: rerun one kernel alone, from a saved case or a synthetic one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from detaudit.commands.delivery import STDOUT, check, deliver, json_option, show
from detaudit.core.errors import UsageError
from detaudit.core.records import KernelReport, kernels_json
from detaudit.reporters.json import write_json

if TYPE_CHECKING:
    from detaudit.kernels.backend import Backend, Options
    from detaudit.kernels.routing import Routing
    from detaudit.kernels.runner import Progress
    from detaudit.kernels.shapes import Synthetic

DTYPES = ("nvfp4", "bf16", "fp16", "fp8")
ROUTINGS: tuple[Routing, ...] = ("uniform", "skewed", "hot")
DEFAULT_BACKEND = "flashinfer-cutlass"
DEFAULT_TOKENS = "64"


@dataclass(frozen=True, slots=True)
class Request:
    """The command line of ``detaudit kernels``."""

    case: Path | None
    shape: str | None
    dtype: str | None
    backend: str | None
    tokens: str | None
    routing: Routing | None
    top_k: int | None
    runs: int
    sweep: tuple[str, ...]
    static: bool
    sm: str | None
    limit: int


@click.command()
@click.argument("case", type=click.Path(path_type=Path), required=False)
@click.option("--shape", help="A synthetic layer instead of CASE: a model's name, or E,K,H,I.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the synthetic weights.  [default: nvfp4]")
@click.option("--tokens", help="Synthetic batch sizes, such as 1,16,64.  [default: 64]")
@click.option("--routing", type=click.Choice(ROUTINGS), help="Synthetic routing.  [default: uniform]")
@click.option("--top-k", type=click.IntRange(min=1), help="Experts per token instead of the shape's own.")
@click.option("--backend", help="flashinfer-cutlass or reference.  [default: the one CASE was captured from]")
@click.option(
    "--runs", type=click.IntRange(min=1), default=300, show_default=True, help="Comparisons per variant."
)
@click.option("--sweep", multiple=True, metavar="SET", help="Add a set of variants, such as tactics.")
@click.option(
    "--static", is_flag=True, help="Build FlashInfer's kernels for --sm and scan them; needs no GPU."
)
@click.option("--sm", metavar="NUMBER", help="Architecture for --static, such as 120.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Pairs of kernels for --static, a minute or two each.",
)
@json_option
def command(json_file: Path | None, **options: object) -> int:
    """Rerun one kernel under variants and find a bit-stable setting.

    CASE is a folder that `detaudit run` captured, beside the trace. Each variant runs once and then
    300 times more, with poisoned output and workspace, and is compared bit for bit with its first run.

    \b
    Ends with
      0  the case's own settings cannot take the racy kernel and did not differ, while the control did
      1  the case's own settings gave different bits
      3  nothing was decided: vacuous control, not reproduced, unsupported, or settings that may still
         take the racy kernel

    With --static nothing runs: a few GEMM2 kernels of the installed FlashInfer are compiled for an
    architecture that need not be here, each with the fused finalize (FINALIZE) and without (NONE), and
    their machine code is scanned. It ends with 0 if no NONE kernel can accumulate in an unordered way,
    else with 1.

    \b
    Example:
      detaudit kernels moe.detaudit.d/case-layers.0.mlp.experts#0
      detaudit kernels --shape qwen3-30b-a3b --dtype bf16 --tokens 1,64,1024 --sweep tactics
      detaudit kernels --shape 16,8,512,256 --backend reference
      detaudit kernels --static --sm 120 --dtype nvfp4
    """
    from detaudit.kernels.outcomes import exit_code
    from detaudit.reporters.terminal import render_kernels

    request = Request(**options)  # type: ignore[arg-type]
    _check(request)
    check(json_file)
    if request.static:
        return _static(request, json_file)
    reports = list(_reports(request))
    code = exit_code(reports)
    show(lambda stream: render_kernels(reports, stream), aside=json_file == STDOUT)
    deliver(lambda stream: write_json(kernels_json(reports, code), stream), json_file)
    return code


def _static(request: Request, json_file: Path | None) -> int:
    from detaudit.reporters.progress import progress
    from detaudit.reporters.scan_terminal import render_scan
    from detaudit.scan.static_build import static_scan

    with progress(2 * request.limit, "compiling") as bar:
        report = static_scan(request.sm or "", request.dtype or DTYPES[0], request.limit, bar.advance)
    show(lambda stream: render_scan(report, stream, everything=True), aside=json_file == STDOUT)
    deliver(lambda stream: write_json(report.to_json(), stream), json_file)
    return int(any(kernel.suspect for kernel in report.kernels if kernel.finalize != "FINALIZE"))


def _check(request: Request) -> None:
    if request.static:
        if request.case or request.shape or request.sm is None:
            raise UsageError("--static takes --sm NUMBER, and no CASE or --shape; such as --static --sm 120")
        return
    if request.sm is not None:
        raise UsageError("--sm goes with --static; without it kernels run on the GPU that is here")
    if (request.case is None) == (request.shape is None):
        raise UsageError("give either a CASE folder or --shape; see 'detaudit kernels --help'")
    synthetic = {"--dtype": request.dtype, "--tokens": request.tokens, "--routing": request.routing}
    for option, value in (synthetic | {"--top-k": request.top_k}).items():
        if request.case is not None and value is not None:
            raise UsageError(f"{option} makes a synthetic case; leave it out when giving a CASE folder")


def _reports(request: Request) -> Iterator[KernelReport]:
    """One report per case; a synthetic case is freed before the next one is made."""
    with _progress() as progress:
        if request.case is None:
            yield from _synthetic(request, progress)
        else:
            yield _saved(request, request.case, progress)


def _saved(request: Request, folder: Path, progress: Progress) -> KernelReport:
    from detaudit.kernels.cases import Case
    from detaudit.kernels.confirm import all_backends, backend_for, backend_named, confirm_with

    case = Case.load(folder)
    backend = backend_named(request.backend) if request.backend else backend_for(case, all_backends())
    return confirm_with(
        backend, case, runs=request.runs, options=_options(request, backend), progress=progress
    )


def _synthetic(request: Request, progress: Progress) -> Iterator[KernelReport]:
    from detaudit.kernels.backend import Unavailable
    from detaudit.kernels.confirm import backend_named, confirm_with, unsupported_report

    backend = backend_named(request.backend or DEFAULT_BACKEND)
    options = _options(request, backend)
    for wanted in _wanted(request):
        progress(f"making {wanted.name}", 0, 0)
        case = backend.synthetic(wanted)
        if isinstance(case, Unavailable):
            hint = "" if request.backend else "; --backend reference runs the shape in plain torch, anywhere"
            yield unsupported_report(wanted.name, None, backend.name, f"{case.sentence}{hint}")
        else:
            yield confirm_with(backend, case, runs=request.runs, options=options, progress=progress)


def _wanted(request: Request) -> list[Synthetic]:
    from detaudit.kernels.shapes import Synthetic, parse_shape

    shape = parse_shape(request.shape or "")
    if request.top_k is not None:
        if request.top_k > shape.experts:
            raise UsageError(f"--top-k {request.top_k} is more than the {shape.experts} experts of the shape")
        shape = replace(shape, top_k=request.top_k)
    dtype, routing = request.dtype or DTYPES[0], request.routing or ROUTINGS[0]
    return [Synthetic(shape, tokens, dtype, routing) for tokens in _tokens(request.tokens or DEFAULT_TOKENS)]


def _tokens(text: str) -> list[int]:
    try:
        tokens = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--tokens {text!r} is not a list of numbers such as 1,16,64") from error
    if min(tokens) < 1:
        raise UsageError(f"--tokens {text!r} holds a number below 1; a batch has at least one token")
    return tokens


def _options(request: Request, backend: Backend | None) -> Options:
    from detaudit.kernels.backend import Options

    known = backend.sweeps if backend else ()
    for sweep in request.sweep:
        if sweep not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise UsageError(f"backend {backend.name if backend else 'none'} has no sweep {sweep!r}; {has}")
    return Options(sweeps=request.sweep)


@contextmanager
def _progress() -> Iterator[Progress]:
    from detaudit.progress import Counted
    from detaudit.reporters.progress import progress

    with progress(None, "preparing") as bar:
        yield Counted(bar)
