"""Finding images in files of every kind, and in files that only look like one."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detaudit.scan.containers import (
    EM_CUDA,
    FATBIN_MAGIC,
    architectures,
    images,
    may_hold_images,
    spells_out,
)
from tests.scan.support import BARE, KERNELS, PTX_ONLY


def test_a_fatbin_is_one_image() -> None:
    (image,) = images(KERNELS)
    assert (image.kind, image.offset, image.size) == ("fatbin", 0, KERNELS.stat().st_size)
    assert b"".join(image.chunks()) == KERNELS.read_bytes()


def test_a_cubin_is_one_image() -> None:
    (image,) = images(BARE)
    assert (image.kind, image.offset) == ("cubin", 0)
    assert image.size <= BARE.stat().st_size


def test_images_among_other_bytes_are_found_where_they_are(tmp_path: Path) -> None:
    fatbin, cubin = KERNELS.read_bytes(), BARE.read_bytes()
    host = b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", 62) + bytes(64)
    path = tmp_path / "library.so"
    path.write_bytes(host + fatbin + b"x" * 8 + cubin + FATBIN_MAGIC + b"too short" + PTX_ONLY.read_bytes())
    found = images(path)
    assert [image.kind for image in found] == ["fatbin", "cubin", "fatbin"]
    assert found[0].offset == len(host)
    assert b"".join(found[0].chunks()) == fatbin
    assert b"".join(found[1].chunks()) == cubin[: found[1].size]
    assert b"".join(found[2].chunks()) == PTX_ONLY.read_bytes()


def test_magic_numbers_without_an_image_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    cuda = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 2, EM_CUDA, 1, 0, 0, 1 << 40, 0, 64, 56, 0, 64, 9, 0
    )
    path.write_bytes(FATBIN_MAGIC + struct.pack("<HHQ", 1, 16, 1 << 40) + FATBIN_MAGIC * 3 + cuda)
    assert images(path) == []


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 40_000), prefix=st.binary(max_size=40))
def test_a_truncated_file_gives_no_image_beyond_its_end(
    cut: int, prefix: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "file"
    data = prefix + KERNELS.read_bytes() + BARE.read_bytes()
    path.write_bytes(data[:cut])
    for image in images(path):
        assert image.offset + image.size <= cut


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.so"
    path.touch()
    assert images(path) == []
    assert not may_hold_images(path)


def test_only_files_that_begin_like_one_are_looked_into(tmp_path: Path) -> None:
    assert may_hold_images(KERNELS)
    assert may_hold_images(BARE)
    for name, head in {"a.a": b"!<arch>\n", "l.so": b"\x7fELF\x02\x01\x01"}.items():
        (tmp_path / name).write_bytes(head)
        assert may_hold_images(tmp_path / name)
    (tmp_path / "readme").write_bytes(b"text")
    assert not may_hold_images(tmp_path / "readme")


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "k.fatbin"
    path.write_bytes(KERNELS.read_bytes())
    (image,) = images(path)
    path.write_bytes(b"")
    with pytest.raises(OSError, match="became shorter"):
        list(image.chunks())


def fatbin_of(*entries: tuple[int, int, int]) -> bytes:
    """A fatbin of entries (kind, architecture, bytes of payload)."""
    body = b"".join(
        struct.pack("<HHIQ8xHHI32x", kind, 0x101, 64, size, 0, 1, arch) + bytes(size)
        for kind, arch, size in entries
    )
    return FATBIN_MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_the_architectures_of_a_fatbin_are_in_its_headers(tmp_path: Path) -> None:
    ptx, cubin, lto = 1, 2, 8
    path = tmp_path / "k.fatbin"
    path.write_bytes(fatbin_of((cubin, 80, 24), (ptx, 90, 8), (cubin, 120, 0), (lto, 75, 16)))
    (image,) = images(path)
    assert architectures(image) == frozenset({80, 120, 75})


def test_the_compilers_own_fatbins_are_read() -> None:
    (image,) = images(KERNELS)
    assert architectures(image) == frozenset({80, 90, 100, 120})
    (ptx_only,) = images(PTX_ONLY)
    assert architectures(ptx_only) == frozenset()
    (bare,) = images(BARE)
    assert architectures(bare) is None


@pytest.mark.parametrize("damage", [(8, 3), (8, -3), (20, 5)])
def test_entries_that_do_not_add_up_tell_nothing(tmp_path: Path, damage: tuple[int, int]) -> None:
    where, by = damage
    data = bytearray(fatbin_of((2, 80, 24), (2, 90, 24)))
    data[where] += by  # of the fatbin's size, or of the first entry's header size
    path = tmp_path / "k.fatbin"
    path.write_bytes(data + bytes(16))
    (image,) = images(path)
    assert architectures(image) is None


def test_a_symbol_counts_only_where_the_host_spells_it_out(tmp_path: Path) -> None:
    path = tmp_path / "l.so"
    fatbin = KERNELS.read_bytes()
    path.write_bytes(fatbin + b" sum_rows " + fatbin)
    assert spells_out(path, images(path), [b"nowhere", b"sum_rows"])
    assert not spells_out(path, images(path), [FATBIN_MAGIC])
    path.write_bytes(b"")
    assert not spells_out(path, [], [b""])


def test_a_cubin_whose_sections_are_too_small_is_none(tmp_path: Path) -> None:
    path = tmp_path / "odd.cubin"
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 2, EM_CUDA, 1, 0, 0, 60, 0, 64, 0, 0, 0, 3, 0)
    path.write_bytes(head + b"xxx")
    assert images(path) == []
