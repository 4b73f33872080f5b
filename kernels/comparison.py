"""Outputs of many runs against the first one, compared bit for bit where they lie.

Every output is copied into a slot of a ring; once per batch the ring is compared as a whole, with one
synchronisation. Elementwise extremes over all runs stand in for the outputs themselves: ULP distance and
absolute difference grow monotonically with the value, so the largest of either is found at an extreme.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from detaudit.core.numbers import difference
from detaudit.kernels.backend import Fill

RING_BYTES = 64 << 20
BATCH = 64
"""Runs per synchronisation at most; fewer where so many outputs do not fit the ring."""

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_ORDERED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIGH = -(1 << 32)


class Ring:
    """Room for a batch of outputs of one dtype and shape; shared by the variants of a case."""

    def __init__(self, like: Tensor) -> None:
        self.dtype, self.shape, self.numel = like.dtype, like.shape, like.numel()
        self.capacity = max(1, min(BATCH, RING_BYTES // max(1, like.nbytes)))
        lanes = (like.nbytes + 3) // 4
        self._lanes = torch.zeros(self.capacity, lanes, dtype=torch.int32, device=like.device)
        self._words = self._lanes.view(_SAME_SIZE[like.element_size()])[:, : like.nbytes // self.word_bytes]
        generator = torch.Generator(like.device).manual_seed(0)
        self._weights = torch.empty(2, lanes, dtype=torch.int64, device=like.device)
        self._weights.random_(-(2**63), None, generator=generator)

    @property
    def word_bytes(self) -> int:
        return _SAME_SIZE[self.dtype.itemsize].itemsize

    def fits(self, output: Tensor) -> bool:
        return (output.dtype, output.shape, output.device) == (self.dtype, self.shape, self._lanes.device)

    def put(self, slot: int, output: Tensor) -> None:
        self._words[slot].copy_(as_words(output))

    def words(self, count: int) -> Tensor:
        return self._words[:count]

    def values(self, count: int) -> Tensor:
        """[count, elements] in the outputs' own dtype."""
        return self._words[:count].view(self.dtype)

    def keys(self, slots: Tensor) -> list[int]:
        """A 64-bit digest of each slot: two multilinear hashes over 32-bit lanes, the high half of each.

        Lemire and Kaser, "Strongly universal string hashing is fast" (2014), section 2. The chance that
        two different outputs share a key is below 2^-60.
        """
        lanes = self._lanes[slots].to(torch.int64)
        first, second = ((lanes * weight).sum(dim=1) for weight in self._weights)
        keys: list[int] = ((first & _HIGH) | ((second >> 32) & ~_HIGH)).tolist()
        return keys


def as_words(tensor: Tensor) -> Tensor:
    """The logical elements as a flat integer tensor of the same size."""
    return tensor.detach().contiguous().view(-1).view(_SAME_SIZE[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a variant's runs compare with its first.

    Args:
        distinct: different outputs seen, the first included.
        rows_differing: rows (all dimensions but the last, flattened) that differ in any run.
        max_ulp, max_abs: 0 where nothing differs; ``None`` for dtypes without an order.
        follows_fill: the output followed what its buffers held before the run, and nothing else.
    """

    runs: int
    runs_differing: int
    distinct: int
    rows_differing: int
    rows_total: int | None
    max_ulp: int | None
    max_abs: float | None
    follows_fill: bool


class Comparison:
    """Collects one variant's outputs; ``add`` never synchronises, ``flush`` does once."""

    def __init__(self, reference: Tensor, fill: Fill, ring: Ring) -> None:
        self.reference = reference.detach().clone(memory_format=torch.contiguous_format)
        self._words = as_words(self.reference)
        self._ring = ring
        self._pending: list[Fill] = []
        self._keys: dict[Fill, list[int | None]] = defaultdict(list, {fill: [None]})
        self._differs = torch.zeros_like(self._words, dtype=torch.bool)
        self._extremes = _Extremes(self.reference) if self.reference.dtype in _ORDERED else None

    @property
    def pending(self) -> int:
        """Outputs added since the last flush."""
        return len(self._pending)

    @property
    def full(self) -> bool:
        return len(self._pending) == self._ring.capacity

    def add(self, output: Tensor, fill: Fill) -> None:
        """Raises ValueError if the output has another dtype, shape or device than the first."""
        if not self._ring.fits(output):
            raise ValueError(f"the output changed to {output.dtype} {tuple(output.shape)} on {output.device}")
        self._ring.put(len(self._pending), output)
        self._pending.append(fill)

    def flush(self) -> int:
        """Compare what was added; returns how many outputs that was."""
        count = len(self._pending)
        unequal = self._ring.words(count) != self._words
        slots = unequal.any(dim=1).nonzero().flatten()
        keys: dict[int, int] = {}
        if len(slots):
            keys = dict(zip(slots.tolist(), self._ring.keys(slots), strict=True))
            self._differs |= unequal.any(dim=0)
            if self._extremes:
                self._extremes.add(self._ring.values(count))
        for slot, fill in enumerate(self._pending):
            self._keys[fill].append(keys.get(slot))
        self._pending.clear()
        return count

    def result(self) -> Agreement:
        keys = [key for per_fill in self._keys.values() for key in per_fill]
        differing = sum(key is not None for key in keys)
        columns = self.reference.shape[-1] if self.reference.dim() else 1
        rows = self._differs.view(
            -1, max(1, columns * self.reference.element_size() // self._ring.word_bytes)
        )
        max_ulp, max_abs = self._extremes.largest() if self._extremes and differing else (0, 0.0)
        unordered = differing > 0 and self._extremes is None
        return Agreement(
            runs=len(keys) - 1,
            runs_differing=differing,
            distinct=len(set(keys)),
            rows_differing=int(rows.any(dim=1).sum()),
            rows_total=self.reference.numel() // max(1, columns),
            max_ulp=None if unordered else max_ulp,
            max_abs=None if unordered else max_abs,
            follows_fill=differing > 0 and self._follows_fill(),
        )

    def _follows_fill(self) -> bool:
        """A race would show among runs with equal fills; a read of stale memory shows only between them."""
        zeros, ones, random = (self._keys[fill] for fill in ("zeros", "ones", "random"))
        if min(len(zeros), len(ones), len(random)) < 2 or len(set(zeros)) > 1 or len(set(ones)) > 1:
            return False
        return zeros[0] != ones[0] or zeros[0] not in random


class _Extremes:
    """Smallest and largest value of every element over the runs, NaNs apart.

    A pair of which one or both are NaN has no distance in ULPs and takes no part; if just one is, the
    absolute difference is infinite, as in ``core.numbers.difference``.
    """

    def __init__(self, reference: Tensor) -> None:
        self._nan = reference.view(-1).isnan()
        self._base = torch.where(self._nan, 0, reference.view(-1))
        self._low = self._high = self._base
        self._one_sided = torch.zeros((), dtype=torch.bool, device=reference.device)

    def add(self, values: Tensor) -> None:
        """``values``: [runs, elements]."""
        nan = values.isnan()
        self._one_sided |= (nan != self._nan).any()
        values = torch.where(nan | self._nan, self._base, values)
        self._low = torch.minimum(self._low, values.amin(dim=0))
        self._high = torch.maximum(self._high, values.amax(dim=0))

    def largest(self) -> tuple[int, float]:
        """(ULPs, absolute difference) between the reference and the extreme farthest from it."""
        low, high = difference(self._base, self._low), difference(self._base, self._high)
        max_abs = inf if self._one_sided else max(low.max_abs, high.max_abs)
        return max(low.max_ulp, high.max_ulp), max_abs
