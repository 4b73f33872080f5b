"""Kernels by module, for a terminal: what suspects ran in each origin, and where else they did."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

from detaudit.core.launches import LaunchedKernel, LaunchReport, ModuleLaunches
from detaudit.reporters.console import on_console
from detaudit.reporters.scan_wording import CAVEAT

_COLOUR = {"suspects in an origin": "bold red", "origin without a suspect": "bold yellow", "risk": "yellow"}


def render_launches(
    report: LaunchReport, stream: IO[str], *, everything: bool = False, width: int | None = None
) -> None:
    """Write the report; ``everything`` lists modules in which nothing was found too."""

    def show(console: Console) -> None:
        console.print(Text(_headline(report), style="bold"))
        quiet = 0
        for module in report.modules:
            if module.judgement == "nothing found" and not everything:
                quiet += 1
                continue
            console.print()
            _module(console, module, everything)
        if quiet:
            console.print()
            console.print(Text(f"{quiet:,} more {_modules(quiet)}: no suspect ran; --all lists them"))
        unread = {
            kernel.short for module in report.modules for kernel in module.kernels if not kernel.meaning
        }
        if unread:
            listed = ", ".join(sorted(unread)[:5])
            console.print(
                Text(f"no machine code found for {len(unread):,} kernels: {listed}", style="yellow")
            )
        console.print()
        console.print(Text(CAVEAT, style="dim"))

    on_console(stream, width, show)


def _headline(report: LaunchReport) -> str:
    launched = sum(kernel.launches for module in report.modules for kernel in module.kernels)
    suspects = [module for module in report.modules if module.suspects]
    where = f"suspects ran in {len(suspects):,} {_modules(len(suspects))}" if suspects else "no suspect ran"
    return f"{launched:,} launches in {len(report.modules):,} {_modules(len(report.modules))}; {where}"


def _modules(count: int) -> str:
    return "module" if count == 1 else "modules"


def _module(console: Console, module: ModuleLaunches, everything: bool) -> None:
    name = "outside of modules" if module.module is None else module.module or "the root module"
    console.print(
        Text.assemble((name, _COLOUR.get(module.judgement, "")), f"  {module.judgement}"), soft_wrap=True
    )
    console.print(Text(f"  {module.explanation}"))
    for kernel in module.kernels if everything else module.suspects:
        console.print(Text(f"    {_kernel(kernel)}"))


def _kernel(kernel: LaunchedKernel) -> str:
    times = "once" if kernel.launches == 1 else f"{kernel.launches:,} times"
    epilogue = f", epilogue {kernel.finalize}" if kernel.finalize else ""
    if kernel.meaning is None:
        return f"{kernel.short}{epilogue}: launched {times}, no machine code found"
    what = f"accumulates {', '.join(kernel.accumulates)}" if kernel.suspect else kernel.meaning
    doubt = "" if kernel.certain else " (one of several kernels of this name; others do not)"
    return f"{kernel.short}{epilogue}: launched {times}, {what}{doubt}"
