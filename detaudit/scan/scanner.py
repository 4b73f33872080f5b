"""Many images at once: taken out, disassembled and read in parallel, one image in memory at no time."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from detaudit.core.scans import MEANINGS, FileScan, KernelScan, ScanReport
from detaudit.scan.cache import Cache
from detaudit.scan.containers import Image, arch_number, architectures, images
from detaudit.scan.functions import Function, functions
from detaudit.scan.names import demangle, finalize_of, shorten
from detaudit.scan.selection import EVERYTHING, Selection, functions_in
from detaudit.scan.tools import NotDisassembled, Tools, disassembly, extract


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be scanned: images, files that hold any or could not be read, and why."""

    images: tuple[Image, ...]
    files: tuple[Path, ...]
    unread: tuple[FileScan, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """How to scan.

    Args:
        archs: architectures to look at (``90`` also means ``90a`` and ``90f``); all if empty.
        selection: which kernels to look at.
        jobs: images at a time; 0 takes one per CPU this process may use.
        cache: folder of earlier results, or None for none.
    """

    archs: tuple[str, ...] = ()
    selection: Selection = EVERYTHING
    jobs: int = 0
    cache: Path | None = None

    @property
    def workers(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))

    def wants_some_of(self, image: Image) -> bool:
        """False only if the image's own headers say that it holds nothing for these architectures.

        Raises:
            OSError: the file cannot be read.
        """
        held = architectures(image) if self.archs else None
        return held is None or not held.isdisjoint(arch_number(arch) for arch in self.archs)

    def wants(self, arch: str) -> bool:
        number = arch.removeprefix("sm_")
        return not self.archs or number in self.archs or number.rstrip("af") in self.archs


_TEMPORARY: Final = re.compile(r"'?/\S*/detaudit-scan-\S*?'?(?=\s|$)")


@dataclass(frozen=True, slots=True)
class _Result:
    functions: tuple[Function, ...]
    problem: str | None = None


def plan(files: Iterable[Path], named: Collection[Path] = ()) -> Plan:
    """Find the images; ``unread`` tells of files that cannot be read, and of ``named`` ones without any."""
    found: list[Image] = []
    kept: list[Path] = []
    unread: list[FileScan] = []
    for path in files:
        try:
            inside = images(path)
        except OSError as error:
            unread.append(FileScan(str(path), 0, 0, f"cannot be read: {error.strerror or error}"))
            continue
        if inside:
            kept.append(path)
            found += inside
        elif path in named:
            unread.append(FileScan(str(path), 0, 0, "no machine code for a GPU in it"))
    return Plan(tuple(found), tuple(kept), tuple(unread))


def scan(
    plan: Plan, tools: Tools, settings: Settings, advance: Callable[[], None] = lambda: None
) -> ScanReport:
    """Scan every image of the plan.

    Args:
        advance: called in this thread whenever an image is done.
    """
    salt = "|".join((*tools.versions, *sorted(settings.archs), settings.selection.salt))
    worker = _Worker(tools, settings, Cache(settings.cache, salt))
    results: dict[int, _Result] = {}
    with ThreadPoolExecutor(settings.workers, "scan") as pool:
        # The largest first, so that none is left for the end when the others are done.
        order = sorted(range(len(plan.images)), key=lambda index: -plan.images[index].size)
        futures = {pool.submit(worker.image, plan.images[index]): index for index in order}
        try:
            for future in as_completed(futures):
                results[futures[future]] = future.result()
                advance()
        except BaseException:
            _cancel(futures)
            raise
    return _report(plan, [results[index] for index in range(len(plan.images))], tools, settings)


def _cancel(futures: Iterable[Future[_Result]]) -> None:
    for future in futures:
        future.cancel()


class _Worker:
    def __init__(self, tools: Tools, settings: Settings, cache: Cache) -> None:
        self._tools, self._settings, self._cache = tools, settings, cache

    def image(self, image: Image) -> _Result:
        try:
            if not self._settings.wants_some_of(image):
                return _Result(())
            key = self._cache.key(image.chunks())
            cached = self._cache.get(key)
            if cached is not None:
                return _Result(cached)
            found = tuple(self._functions(image))
        except NotDisassembled as error:
            return _Result((), _TEMPORARY.sub("the image", str(error)))
        except OSError as error:
            return _Result((), f"cannot be scanned: {error.strerror or error}")
        self._cache.put(key, found)
        return _Result(found)

    def _functions(self, image: Image) -> Iterator[Function]:
        with tempfile.TemporaryDirectory(prefix="detaudit-scan-") as folder:
            path = Path(folder) / f"image.{image.kind}"
            with path.open("wb") as file:
                file.writelines(image.chunks())
            cubins = (
                extract(self._tools, path, self._settings.archs)
                if image.kind == "fatbin"
                else [(path, "unknown")]
            )
            for cubin, arch in cubins:
                if arch == "unknown" or self._settings.wants(arch):
                    yield from self._chosen(cubin, arch)
                cubin.unlink()

    def _chosen(self, cubin: Path, arch: str) -> list[Function]:
        if self._settings.selection.everything:
            return self._disassembled(cubin, arch)
        chosen = self._settings.selection.chosen(functions_in(cubin))
        return [found for found in self._disassembled(cubin, arch) if found.name in chosen] if chosen else []

    def _disassembled(self, cubin: Path, arch: str) -> list[Function]:
        """Functions by the first nvdisasm that knows the architecture.

        Raises:
            NotDisassembled: none does; what the first one said.
        """
        first: NotDisassembled | None = None
        for tool in self._tools.nvdisasm:
            try:
                with disassembly(tool, cubin) as lines:
                    found = list(functions(lines, arch))
            except NotDisassembled as error:
                first = first or error
            else:
                return [function for function in found if self._settings.wants(function.arch)]
        raise first or NotDisassembled("no nvdisasm was found")


def _report(plan: Plan, results: Sequence[_Result], tools: Tools, settings: Settings) -> ScanReport:
    kernels: list[KernelScan] = []
    files = list(plan.unread)
    by_file: dict[Path, list[_Result]] = defaultdict(list)
    for image, result in zip(plan.images, results, strict=True):
        by_file[image.path].append(result)
    for path in plan.files:
        own = by_file[path]
        found = [function for result in own for function in result.functions]
        problems = Counter(result.problem for result in own if result.problem)
        files.append(FileScan(str(path), len(own), len(found), _problem(problems, own, settings)))
        kernels += _kernels(str(path), found)
    kernels.sort(key=lambda kernel: (MEANINGS.index(kernel.meaning), kernel.short, kernel.arch, kernel.name))
    return ScanReport(tuple(kernels), tuple(files), tools.versions)


def _problem(problems: Counter[str], results: Sequence[_Result], settings: Settings) -> str | None:
    if problems:
        said, _ = problems.most_common(1)[0]
        return f"{problems.total():,} of {len(results):,} images not read: {said}"
    if any(result.functions for result in results) or not settings.selection.everything:
        return None
    if settings.archs:
        return f"no machine code for SM {', '.join(settings.archs)}"
    return "no machine code: PTX is compiled on the machine that runs it"


def _kernels(path: str, found: Iterable[Function]) -> Iterator[KernelScan]:
    """One entry per function; the same function compiled into several images is one with copies."""
    counted = Counter(found)
    names = demangle([function.name for function in counted])
    for function, copies in counted.items():
        yield KernelScan(
            function.name,
            shorten(names[function.name]),
            function.arch,
            path,
            function.entry,
            function.atomics,
            finalize_of(function.name),
            copies,
        )
