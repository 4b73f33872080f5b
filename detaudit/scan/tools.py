"""cuobjdump takes cubins out of a fatbin, nvdisasm prints one; where they are, and how they are run."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Final

from detaudit.core.errors import Unsupported

EXTRA: Final = "pip install 'detaudit[scan]'"
_ARCH: Final = re.compile(r"\.(sm_\w+)\.cubin$")


class NotDisassembled(Exception):
    """A tool failed on an image, and what it said; told with the file, never raised to the user."""


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs found, in the order in which they are tried; each at least once."""

    cuobjdump: tuple[Path, ...]
    nvdisasm: tuple[Path, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        """``nvdisasm 13.0.85 (/usr/local/cuda/bin/nvdisasm)``, ..."""
        return tuple(f"{path.name} {version(path)} ({path})" for path in (*self.cuobjdump, *self.nvdisasm))


def find_tools() -> Tools:
    """CUDA's own tools first (CUDA_HOME, PATH, /usr/local/cuda), then Triton's, then those of the extra.

    Raises:
        Unsupported: nvdisasm or cuobjdump is nowhere; says how to install both.
    """
    found = {name: _find(name) for name in ("cuobjdump", "nvdisasm")}
    missing = [name for name, paths in found.items() if not paths]
    if missing:
        raise Unsupported(
            f"{' and '.join(missing)} not found: the scan reads machine code with NVIDIA's disassembler; "
            f"install it with {EXTRA} or put CUDA's bin folder on PATH"
        )
    return Tools(found["cuobjdump"], found["nvdisasm"])


def _find(name: str) -> tuple[Path, ...]:
    candidates = [folder / name for folder in _folders()]
    found = [path for path in candidates if path.is_file() and os.access(path, os.X_OK)]
    return tuple(dict.fromkeys(path.resolve() for path in found))


def _folders() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home) / "bin"
    for name in ("nvdisasm", "cuobjdump"):
        if there := shutil.which(name):
            yield Path(there).parent
    yield Path("/usr/local/cuda/bin")
    yield from (folder / "backends" / "nvidia" / "bin" for folder in _package("triton"))
    for folder in _package("nvidia"):
        yield from sorted(folder.glob("*/bin"), reverse=True)


def package_path(name: str) -> Path | None:
    """Folder of an installed package, which is not imported."""
    return next(iter(_package(name)), None)


def _package(name: str) -> list[Path]:
    """Folders of an installed package, which is not imported."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


@cache
def version(tool: Path) -> str:
    """``13.0.85``, or ``unknown``."""
    try:
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    match = re.search(r"\bV(\d+(?:\.\d+)+)", done.stdout)
    return match[1] if match else "unknown"


def extract(tools: Tools, fatbin: Path, archs: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Cubins of a fatbin with their architectures, written beside it; none if it holds PTX only.

    Args:
        archs: numbers such as ``90``, of which also ``90a`` and ``90f`` are taken; all if empty.

    Raises:
        NotDisassembled: no cuobjdump could read it.
    """
    # cuobjdump takes every cubin whose name contains the text, and names them FATBIN.INDEX.ARCH.cubin.
    wanted = [f".sm_{number}" for number in dict.fromkeys(arch.rstrip("af") for arch in archs)] or ["all"]
    said = ""
    for tool in tools.cuobjdump:
        runs = [_run([tool, "-xelf", text, fatbin.name], fatbin.parent) for text in wanted]
        cubins = sorted(fatbin.parent.glob(f"{fatbin.stem}.*.cubin"))
        failed = next((done for done in runs if done.returncode), None)
        if failed is None:
            return [(path, _arch(path)) for path in cubins]
        said = _last_line(failed.stderr or failed.stdout) or f"it ended with {failed.returncode}"
        for path in cubins:
            path.unlink()
    raise NotDisassembled(f"cuobjdump: {said}")


def _run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))


def _arch(path: Path) -> str:
    match = _ARCH.search(path.name)
    return match[1] if match else "unknown"


@contextmanager
def disassembly(tool: Path, cubin: Path) -> Iterator[IO[bytes]]:
    """The lines nvdisasm prints for a cubin, as it prints them; the process does not outlive the block.

    Raises:
        NotDisassembled: nvdisasm failed, on leaving the block.
    """
    with tempfile.TemporaryFile() as errors:
        # No dataflow analysis: it only names branch targets, and fails on some valid cubins.
        command: list[str | Path] = [tool, "-ndf", "-c", cubin]
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise NotDisassembled(f"cannot start {tool}: {error.strerror}") from error
        assert process.stdout is not None
        try:
            yield process.stdout
            code = process.wait()
        finally:
            process.stdout.close()
            process.kill()
            process.wait()
        if code:
            errors.seek(0)
            said = _last_line(errors.read().decode("utf-8", "replace"))
            raise NotDisassembled(f"nvdisasm {version(tool)}: {said or f'ended with {code}'}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
