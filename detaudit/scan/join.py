"""A scan beside the kernels that modules launched in a run: which suspects ran, and where. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from detaudit.core.launches import Judgement, LaunchedKernel, Launches, LaunchReport, ModuleLaunches
from detaudit.core.scans import MEANINGS, KernelScan, ScanReport
from detaudit.scan.containers import arch_number
from detaudit.scan.names import demangle, finalize_of, shorten
from detaudit.scan.selection import compact

_ORDER: Final[tuple[Judgement, ...]] = (
    "suspects in an origin",
    "origin without a suspect",
    "risk",
    "nothing found",
)


def join(
    launches: Launches,
    scan: ScanReport,
    origins: Collection[str] | None = None,
    arch: str | None = None,
) -> LaunchReport:
    """Find each launched kernel in the scan, and judge each module by what it launched.

    Args:
        launches: by module, from one run.
        scan: of the libraries, JIT modules and caches that the run used.
        origins: modules in which an audit found that nondeterminism is born; None if there was no audit.
        arch: the GPU's (``sm_90``); machine code for other architectures is left aside where there is some
            for this one.
    """
    known = _by_name(scan.kernels)
    own = {
        module: tuple(_launched(name, count, known, arch) for name, count in sorted(kernels.items()))
        for module, kernels in launches.items()
    }
    wanted = frozenset(origins or ())
    modules = [
        _judged(module, own.get(module, ()), own, wanted, audited=origins is not None)
        for module in (*own, *(origin for origin in sorted(wanted) if origin not in own))
    ]
    modules.sort(key=lambda item: (_ORDER.index(item.judgement), item.module is None, item.module or ""))
    return LaunchReport(tuple(modules), origins is not None, arch, scan.tools)


def matched(names: Iterable[str], scan: ScanReport) -> frozenset[str]:
    """Those of ``names``, as a profiler tells them, that the scan has machine code for."""
    known = _by_name(scan.kernels)
    return frozenset(name for name in names if compact(name) in known)


def _by_name(kernels: Iterable[KernelScan]) -> Mapping[str, list[KernelScan]]:
    """Kernels by symbol and by full name, blanks left out."""
    listed = list(kernels)
    names = demangle([kernel.name for kernel in listed])
    found: dict[str, list[KernelScan]] = defaultdict(list)
    for kernel in listed:
        for name in {compact(kernel.name), compact(names[kernel.name])}:
            found[name].append(kernel)
    return found


def _launched(
    name: str, launches: int, known: Mapping[str, list[KernelScan]], arch: str | None
) -> LaunchedKernel:
    candidates = _for_this_gpu(known.get(compact(name), []), arch)
    full = demangle([name])[name]
    if not candidates:
        return LaunchedKernel(name, shorten(full), launches, None, finalize=finalize_of(name))
    suspects = [kernel for kernel in candidates if kernel.suspect]
    ways = (
        f"{atomic.operation}.{atomic.dtype} {atomic.scope}"
        for kernel in suspects
        for atomic in kernel.atomics
        if atomic.category == "accumulation"
    )
    return LaunchedKernel(
        name,
        candidates[0].short,
        launches,
        min((kernel.meaning for kernel in candidates), key=MEANINGS.index),
        tuple(dict.fromkeys(ways)),
        len(suspects) in (0, len(candidates)),
        candidates[0].finalize,
        tuple(dict.fromkeys(kernel.file for kernel in candidates)),
    )


def _for_this_gpu(kernels: list[KernelScan], arch: str | None) -> list[KernelScan]:
    """Machine code that this GPU can run: of its own number, else of the highest below it in its family."""
    if arch is None:
        return kernels
    number = arch_number(arch)
    fitting = [
        kernel
        for kernel in kernels
        if arch_number(kernel.arch) <= number and arch_number(kernel.arch) // 10 == number // 10
    ]
    best = max((arch_number(kernel.arch) for kernel in fitting), default=0)
    return [kernel for kernel in fitting if arch_number(kernel.arch) == best] or kernels


def _judged(
    module: str | None,
    kernels: tuple[LaunchedKernel, ...],
    own: Mapping[str | None, tuple[LaunchedKernel, ...]],
    origins: frozenset[str],
    *,
    audited: bool,
) -> ModuleLaunches:
    if module is not None and module in origins:
        judgement, explanation = _origin(module, own)
    elif any(kernel.suspect for kernel in kernels):
        judgement = "risk"
        explanation = (
            "it launched a suspect and never differed: another shape, load or GPU may bring it out"
            if audited
            else "it launched a suspect; an audit can tell whether it differs"
        )
    else:
        judgement, explanation = "nothing found", _unread(kernels) or "no suspect ran"
    return ModuleLaunches(module, kernels, judgement, explanation)


def _origin(module: str, own: Mapping[str | None, tuple[LaunchedKernel, ...]]) -> tuple[Judgement, str]:
    """An origin answers for everything launched inside it, by its submodules too."""
    inside = [
        kernel
        for path, kernels in own.items()
        if path is not None and (path == module or not module or path.startswith(f"{module}."))
        for kernel in kernels
    ]
    suspects = list(dict.fromkeys(kernel.short for kernel in inside if kernel.suspect))
    if suspects:
        return "suspects in an origin", f"its outputs differ, and it launched {', '.join(suspects)}"
    unread = _unread(inside)
    if not inside:
        return "origin without a suspect", (
            "its outputs differ and it launched no kernel: look at what it does on the host"
        )
    return "origin without a suspect", (
        "its outputs differ and no suspect ran in it: look for a race or uninitialised memory"
        + (f" ({unread})" if unread else "")
    )


def _unread(kernels: Iterable[LaunchedKernel]) -> str:
    missing = list(dict.fromkeys(kernel.short for kernel in kernels if kernel.meaning is None))
    if not missing:
        return ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"no machine code was found for {', '.join(missing[:3])}{more}"
