"""From what the user names to the files to look into: paths, folders, installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from detaudit.core.errors import TargetNotFound, UsageError
from detaudit.scan.containers import may_hold_images


def files_of(paths: Iterable[Path], packages: Iterable[str] = ()) -> list[Path]:
    """Files that can hold machine code, each once (links and hard links to one file are one).

    Folders are searched through; of a package also what it compiled on this machine. Nothing is imported.

    Raises:
        TargetNotFound: a path does not exist, or a package is not installed.
    """
    seen: set[tuple[int, int]] = set()
    found: list[Path] = []
    for path in (*_named(paths), *(folder for name in packages for folder in package_folders(name))):
        for file in _walk(path):
            try:
                stat = file.stat()
                wanted = (stat.st_dev, stat.st_ino) not in seen and (file == path or may_hold_images(file))
            except OSError:
                continue
            if wanted:
                seen.add((stat.st_dev, stat.st_ino))
                found.append(file)
    return found


def _named(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise TargetNotFound(
                f"{path} does not exist; give a library, object file, cubin, fatbin or folder"
            )
        if not path.is_dir() and not path.is_file():
            raise UsageError(f"{path} is neither a file nor a folder")
        yield path


def _walk(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file = Path(folder) / name
            if file.is_file():
                yield file


def package_folders(name: str) -> list[Path]:
    """Where an installed package keeps its files, by import name or distribution name.

    Raises:
        TargetNotFound: no such package is installed.
    """
    folders = [folder for module in _modules(name) for folder in _module_folders(module)]
    if not folders:
        raise TargetNotFound(
            f"no package {name!r} is installed in this environment; give its import name, or a path"
        )
    if any(folder.name == "flashinfer" for folder in folders):
        folders += flashinfer_builds()
    return folders


def _modules(name: str) -> list[str]:
    try:
        if "." not in name and importlib.util.find_spec(name) is not None:
            return [name]
    except (ImportError, ValueError):
        pass
    wanted = name.lower().replace("_", "-")
    by_module = importlib.metadata.packages_distributions()
    return [
        module
        for module, distributions in by_module.items()
        if any(wanted == found.lower().replace("_", "-") for found in distributions)
    ]


def _module_folders(module: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def flashinfer_builds() -> list[Path]:
    """Where FlashInfer keeps what it compiled or downloaded; as in its ``jit/env.py``, 0.6.15 to 0.7.4."""
    base = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    folders = [base / ".cache" / "flashinfer"]
    if cubins := os.environ.get("FLASHINFER_CUBIN_DIR"):
        folders.append(Path(cubins))
    for companion in ("flashinfer_jit_cache", "flashinfer_cubin"):
        folders += _module_folders(companion)
    return [folder for folder in folders if folder.is_dir()]
