"""The digest's definition once more, as directly as it can be written; what the tests compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence

import xxhash


def plain_leaves(buffer: bytes, shape: Sequence[int], item_bytes: int) -> list[bytes]:
    """The bytes of each leaf."""
    if not buffer:
        return []
    row = item_bytes * shape[-1] if shape else item_bytes
    rows = [buffer[at : at + row] for at in range(0, len(buffer), row)]
    assert len(rows) == math.prod(shape[:-1])
    if row >= 256:
        return [piece[at : at + 65536] for piece in rows for at in range(0, row, 65536)]
    together = 1 if len(rows) <= 65536 else math.ceil(256 / row)
    return [b"".join(rows[at : at + together]) for at in range(0, len(rows), together)]


def plain_digests(buffer: bytes, shape: Sequence[int], item_bytes: int) -> bytes:
    """Leaf digests, little-endian."""
    digests = (xxhash.xxh3_64_intdigest(leaf) for leaf in plain_leaves(buffer, shape, item_bytes))
    return b"".join(digest.to_bytes(8, "little") for digest in digests)


def plain_root(dtype: str, buffer: bytes, shape: Sequence[int], item_bytes: int) -> str:
    """Root in hex."""
    hasher = xxhash.xxh3_128()
    hasher.update(f"{dtype}|{','.join(str(size) for size in shape)}\n".encode())
    hasher.update(plain_digests(buffer, shape, item_bytes))
    return str(hasher.hexdigest())


def pattern(size: int, salt: int = 0) -> bytes:
    """The bytes of the published vectors."""
    return bytes((131 * i + 17 * (i >> 8) + salt) & 255 for i in range(size))
