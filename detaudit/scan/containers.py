"""Machine code images inside a file: fatbins and bare cubins, wherever they lie.

Sections are not consulted, because libraries keep fatbins in several (``.nv_fatbin``, ``__nv_relfatbin``,
plain data) and archives and Triton caches have none. A fatbin begins with the header in CUDA's
``fatbinary_section.h`` and ``fatbinary.h``: magic 0xBA55ED50, version, header size, size of what follows.
A cubin is an ELF file for machine 190 (EM_CUDA). Of a fatbin's entries only the headers are read here
(kind, sizes, architecture: 64 bytes or more, followed by the payload); ``cuobjdump`` takes the code out.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

FATBIN_MAGIC: Final = b"\x50\xed\x55\xba"
ELF_MAGIC: Final = b"\x7fELF\x02\x01"
EM_CUDA: Final = 190
_FATBIN_HEADER: Final = struct.Struct("<4sHHQ")
_FATBIN_ENTRY: Final = struct.Struct("<HHIQ8xHHI32x")
_PTX: Final = 1
_ELF_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_BYTES: Final = 64
"""Of a section's entry in the table."""
_ARCHIVE_MAGIC: Final = b"!<arch>\n"
_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Image:
    """``size`` bytes at ``offset`` of ``path``: a fatbin (of several architectures) or a cubin (of one)."""

    path: Path
    offset: int
    size: int
    kind: Literal["fatbin", "cubin"]

    def chunks(self) -> Iterator[bytes]:
        """The bytes, a megabyte at a time.

        Raises:
            OSError: the file cannot be read, or is shorter than it was.
        """
        left = self.size
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise OSError(f"{self.path} became shorter while it was read")
                left -= len(chunk)
                yield chunk


def arch_number(arch: str) -> int:
    """90 for ``sm_90``, ``sm_90a`` and ``90``; 0 where there is no number."""
    digits = "".join(char for char in arch if char.isdigit())
    return int(digits) if digits else 0


def architectures(image: Image) -> frozenset[int] | None:
    """Numbers of the architectures for which a fatbin holds anything but PTX: ``{80, 90}`` for SM 80 and 90.

    None if that cannot be told: a cubin, or entries that do not add up.

    Raises:
        OSError: the file cannot be read.
    """
    if image.kind != "fatbin":
        return None
    found: set[int] = set()
    at, end = image.offset + _FATBIN_HEADER.size, image.offset + image.size
    with image.path.open("rb") as file:
        while at + _FATBIN_ENTRY.size <= end:
            file.seek(at)
            head = file.read(_FATBIN_ENTRY.size)
            if len(head) < _FATBIN_ENTRY.size:
                return None
            kind, _, header, payload, _, _, arch = _FATBIN_ENTRY.unpack(head)
            if header < _FATBIN_ENTRY.size:
                return None
            if kind != _PTX:
                found.add(arch)
            at += header + payload
    return frozenset(found) if at == end else None


def spells_out(path: Path, found: Iterable[Image], texts: Iterable[bytes]) -> bool:
    """Whether one of ``texts`` is in the file outside of its images, which are mostly compressed.

    A library that registers a kernel with the CUDA runtime spells its symbol out there.

    Raises:
        OSError: the file cannot be read.
    """
    if path.stat().st_size == 0:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        edges = [
            0,
            *(edge for image in found for edge in (image.offset, image.offset + image.size)),
            len(data),
        ]
        outside = [(edges[index], edges[index + 1]) for index in range(0, len(edges), 2)]
        return any(data.find(text, *between) >= 0 for text in texts for between in outside)


def may_hold_images(path: Path) -> bool:
    """Whether the first bytes are those of an ELF file, an archive or a fatbin.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(8)
    return head.startswith((b"\x7fELF", FATBIN_MAGIC)) or head == _ARCHIVE_MAGIC


def images(path: Path) -> list[Image]:
    """Every image in the file, in order; none inside another.

    Raises:
        OSError: the file cannot be read.
    """
    if path.stat().st_size == 0:
        return []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return list(_images(path, data))


def _images(path: Path, data: mmap.mmap) -> Iterator[Image]:
    position = 0
    fatbin, elf = data.find(FATBIN_MAGIC), data.find(ELF_MAGIC)
    while fatbin >= 0 or elf >= 0:
        if elf < 0 or 0 <= fatbin < elf:
            kind: Literal["fatbin", "cubin"] = "fatbin"
            offset, size = fatbin, _fatbin_size(data, fatbin)
        else:
            kind = "cubin"
            offset, size = elf, _cubin_size(data, elf)
        if size:
            yield Image(path, offset, size, kind)
        position = offset + (size or 4)
        if 0 <= fatbin < position:
            fatbin = data.find(FATBIN_MAGIC, position)
        if 0 <= elf < position:
            elf = data.find(ELF_MAGIC, position)


def _fatbin_size(data: mmap.mmap, offset: int) -> int:
    """Size with its header; 0 if these bytes only look like a magic number."""
    if offset + _FATBIN_HEADER.size > len(data):
        return 0
    _, version, header, size = _FATBIN_HEADER.unpack_from(data, offset)
    total: int = header + size
    plausible = version == 1 and header == _FATBIN_HEADER.size and size > 0
    return total if plausible and offset + total <= len(data) else 0


def _cubin_size(data: mmap.mmap, offset: int) -> int:
    """Size up to the last header table or section; 0 for the ELF of a host, or a truncated one."""
    if offset + _ELF_HEADER.size > len(data):
        return 0
    fields = _ELF_HEADER.unpack_from(data, offset)
    machine, program_at, section_at = fields[2], fields[5], fields[6]
    program_size, programs, section_size, sections = fields[9:13]
    if machine != EM_CUDA or not sections or section_size < _SECTION_BYTES:
        return 0
    end: int = max(section_at + section_size * sections, program_at + program_size * programs)
    if offset + end > len(data):
        return 0
    for index in range(sections):
        end = max(end, _section_end(data, offset + section_at + index * section_size))
    return end if offset + end <= len(data) else 0


def _section_end(data: mmap.mmap, header: int) -> int:
    no_bits = 8
    (kind,) = struct.unpack_from("<I", data, header + 4)
    start, size = struct.unpack_from("<QQ", data, header + 24)
    return int(start) if kind == no_bits else int(start + size)
