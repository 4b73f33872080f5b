"""One profiled run of a target, and what the machine code of the kernels it launched says."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from getpass import getuser
from pathlib import Path

import torch

from detaudit.core.errors import Unsupported
from detaudit.core.launches import LaunchReport
from detaudit.core.options import Options
from detaudit.core.scans import FileScan, KernelScan, ScanReport
from detaudit.execution import Session
from detaudit.hooks.launched_kernels import Launched, LaunchedKernels
from detaudit.progress import Progress, Silent
from detaudit.scan.cache import cache_folder
from detaudit.scan.containers import spells_out
from detaudit.scan.join import join, matched
from detaudit.scan.names import identifier
from detaudit.scan.scanner import Plan, Settings, plan, scan
from detaudit.scan.selection import Selection
from detaudit.scan.sources import files_of, flashinfer_builds
from detaudit.scan.tools import find_tools
from detaudit.target import TargetSpec, load

WARM_UP_RUNS = 2
"""Runs before the profiled one: JIT compilation and autotuning launch kernels that are not the model's."""


def launched_by(
    spec: TargetSpec,
    origins: Collection[str] | None = None,
    progress: Progress | None = None,
    jobs: int = 0,
) -> LaunchReport:
    """Run the target, and judge each module by the machine code of the kernels it launched.

    Args:
        origins: modules in which an audit found that nondeterminism is born; None without an audit.

    Raises:
        Unsupported: no GPU, no disassembler, or a target that is a script.
        TargetRaised, TargetInvalid: the target cannot run.
    """
    if spec.is_script:
        raise Unsupported(f"{spec.path} is a script; kernels by module need a target with make_inputs()")
    if not torch.cuda.is_available():
        raise Unsupported(
            "no CUDA GPU is here to run the target on; scan its libraries without --run instead"
        )
    find_tools()
    progress = progress or Silent()
    progress.describe("running the target")
    launches = _profiled(spec)
    names = frozenset(name for kernels in launches.values() for name in kernels)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return join(launches, scan_for(names, arch, progress, jobs), origins, arch)


def _profiled(spec: TargetSpec) -> Launched:
    with Session(load(spec), Options(observer=False, history=False, confirm=False)) as session:
        for _ in range(WARM_UP_RUNS):
            session.execute(recorded=False)
        tap = LaunchedKernels(session.model)
        session.execute(recorded=False, around=tap)
    return tap.by_module()


def scan_for(names: frozenset[str], arch: str, progress: Progress, jobs: int = 0) -> ScanReport:
    """Scan what this process has loaded, and the caches of JIT compilers, until every name is found.

    The caches first; then libraries that spell out one of the names, then the rest by size, since the large
    ones take minutes. Some of those (cuBLASLt, cuFFT) load kernels that they spell out nowhere.
    """
    tools = find_tools()
    settings = Settings((arch.removeprefix("sm_"),), jobs=jobs, cache=cache_folder())
    kernels: list[KernelScan] = []
    files: list[FileScan] = []
    missing = names
    for path, work in (*_planned(files_of(_caches())), *_likely_first(files_of(loaded_libraries()), names)):
        if not missing:
            break
        progress.describe(f"scanning {path.name}, {len(missing):,} kernels to find")
        found = scan(work, tools, replace(settings, selection=Selection(names=missing)))
        kernels += found.kernels
        files += found.files
        missing -= matched(missing, found)
    return ScanReport(tuple(kernels), tuple(files), tools.versions)


def _planned(files: Iterable[Path]) -> Iterator[tuple[Path, Plan]]:
    for path in files:
        work = plan([path])
        if work.images:
            yield path, work


def _likely_first(files: Iterable[Path], names: Iterable[str]) -> list[tuple[Path, Plan]]:
    spelled = sorted({identifier(name).encode() for name in names})

    def rank(item: tuple[Path, Plan]) -> tuple[bool, int]:
        path, work = item
        try:
            return not spells_out(path, work.images, spelled), path.stat().st_size
        except OSError:
            return True, 0

    return sorted(_planned(files), key=rank)


def loaded_libraries() -> list[Path]:
    """Files mapped into this process, in the order of their addresses."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = dict.fromkeys(fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6)
    return [Path(path) for path in paths if path.startswith("/") and Path(path).is_file()]


def _caches() -> list[Path]:
    """Where Triton, torch.compile and FlashInfer keep machine code that need not be in a loaded library."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folders = [Path(triton), Path(inductor or Path(tempfile.gettempdir()) / f"torchinductor_{getuser()}")]
    return [*(folder for folder in folders if folder.is_dir()), *flashinfer_builds()]
