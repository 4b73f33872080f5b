"""Which kernels are wanted, decided by their symbols before anything is disassembled.

Most of a scan's time goes into disassembly; of a library such as torch's, with tens of thousands of kernels,
one usually wants a few.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from detaudit.scan.names import demangle, shorten

_TEXT = b".text."


@dataclass(frozen=True, slots=True)
class Selection:
    """Kernels whose symbol or name matches one of the globs, or is one of ``names``; all if both are empty.

    Args:
        globs: such as ``*index_add*``; matched against symbol, full name and shortened name.
        names: symbols or full names, as a profiler tells them.
    """

    globs: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()

    @property
    def everything(self) -> bool:
        return not self.globs and not self.names

    @property
    def salt(self) -> str:
        """Tells selections apart in a cache."""
        text = "\n".join((*sorted(self.globs), "", *sorted(self.names)))
        return "" if self.everything else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def chosen(self, symbols: Iterable[str]) -> frozenset[str]:
        """Those of ``symbols`` that are wanted."""
        listed = list(symbols)
        if self.everything:
            return frozenset(listed)
        wanted = {compact(name) for name in self.names}
        return frozenset(
            symbol
            for symbol, name in demangle(listed).items()
            if compact(symbol) in wanted or compact(name) in wanted or self._matches(symbol, name)
        )

    def _matches(self, symbol: str, name: str) -> bool:
        return bool(self.globs) and any(
            fnmatchcase(text, glob) for glob in self.globs for text in (symbol, name, shorten(name))
        )


EVERYTHING = Selection()


def compact(name: str) -> str:
    """A name without blanks, since demanglers disagree on where they go (``> >``, ``>>``)."""
    return "".join(name.split())


def functions_in(cubin: Path) -> list[str]:
    """Symbols of the functions of a cubin: it keeps each in a section ``.text.SYMBOL``.

    Raises:
        OSError: it cannot be read, or is not a whole ELF file.
    """
    data = cubin.read_bytes()
    try:
        (table_at,) = struct.unpack_from("<Q", data, 40)
        size, count, names_index = struct.unpack_from("<HHH", data, 58)
        (names_at,) = struct.unpack_from("<Q", data, table_at + names_index * size + 24)
        offsets = [struct.unpack_from("<I", data, table_at + index * size)[0] for index in range(count)]
        names = [data[names_at + offset : data.index(b"\0", names_at + offset)] for offset in offsets]
    except (struct.error, ValueError) as error:
        raise OSError(f"{cubin.name} is not a whole cubin") from error
    return [name[len(_TEXT) :].decode("utf-8", "replace") for name in names if name.startswith(_TEXT)]
