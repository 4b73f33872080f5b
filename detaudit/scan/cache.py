"""What images were found to hold, by their content: a library is disassembled once.

One small JSON file per image under ``$XDG_CACHE_HOME/detaudit/scan`` (``~/.cache/detaudit/scan``), named
by a hash of the bytes, the disassemblers, and the version of the rules in this package. A file that cannot
be read or written is no error: the image is disassembled again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from detaudit.core.errors import DetauditError
from detaudit.core.files import write_text
from detaudit.core.scans import atomic_from_json, atomic_to_json
from detaudit.scan.functions import Function

RULES_VERSION: Final = 2
"""Counted up whenever the same machine code may be classified otherwise."""


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "detaudit" / "scan"


class Cache:
    """Args: folder: where it is kept, None to keep nothing; salt: what else the result depends on."""

    def __init__(self, folder: Path | None, salt: str = "") -> None:
        self._folder = folder
        self._salt = f"{RULES_VERSION}|{salt}".encode()

    def key(self, chunks: Iterable[bytes]) -> str:
        digest = hashlib.blake2b(self._salt, digest_size=20)
        for chunk in chunks:
            digest.update(chunk)
        return digest.hexdigest()

    def get(self, key: str) -> tuple[Function, ...] | None:
        if self._folder is None:
            return None
        try:
            stored = json.loads(self._path(self._folder, key).read_text(encoding="utf-8"))
            return tuple(
                Function(name, arch, bool(entry), tuple(atomic_from_json(item) for item in atomics))
                for name, arch, entry, atomics in stored["functions"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, functions: Iterable[Function]) -> None:
        if self._folder is None:
            return
        stored = [
            [
                function.name,
                function.arch,
                function.entry,
                [atomic_to_json(item) for item in function.atomics],
            ]
            for function in functions
        ]
        path = self._path(self._folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps({"functions": stored}, separators=(",", ":")))
        except (OSError, DetauditError):
            pass

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
