"""Memory on the device that digests are written to, and their way to the host: one copy per run."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from detaudit.core.device.driver import StreamEvent

SEGMENT_BYTES = 16 << 20
LIMIT_BYTES = 512 << 20


@dataclass(eq=False, slots=True)
class Fill:
    """What was written to a segment between two collections; ``data`` is there after the second."""

    data: bytes | None = None


@dataclass(eq=False, slots=True)
class Segment:
    """A piece of device memory that is handed out from the front."""

    memory: Tensor
    address: int
    size: int
    used: int = 0
    fill: Fill = field(default_factory=Fill)


def new_segment(size: int, device: int) -> Segment:
    memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    return Segment(memory, memory.data_ptr(), size)


class RingTooSmall(Exception):
    """One digest alone needs more than the ring may ever hold."""


class Ring:
    """Segments of one device. Grows up to a limit, and is emptied early (a synchronisation) beyond it.

    Args:
        device: index.
        segment_bytes: memory is taken in pieces of at least this size; the first one at once.
        limit_bytes: device memory it may take; the host side takes as much pinned memory again.
    """

    def __init__(
        self, device: int, segment_bytes: int = SEGMENT_BYTES, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.device = device
        self.flushes = 0
        self._segment_bytes = min(segment_bytes, limit_bytes)
        self._limit_bytes = limit_bytes
        self._segments = [new_segment(self._segment_bytes, device)]
        self.current = self._segments[0]
        self._staging: list[Tensor] = []
        self._events: dict[int, StreamEvent] = {}
        self.home_stream = torch.cuda.current_stream(device).cuda_stream

    @property
    def device_bytes(self) -> int:
        return sum(segment.size for segment in self._segments)

    @property
    def pinned_bytes(self) -> int:
        return sum(staging.numel() for staging in self._staging)

    def reserve(self, size: int) -> tuple[Segment, int]:
        """A segment and the offset of ``size`` bytes in it (a multiple of 16).

        Raises:
            RingTooSmall: more than the limit is asked for.
        """
        segment = self.current
        offset = segment.used
        if offset + size > segment.size:
            segment, offset = self._next(size), 0
        segment.used = offset + size
        return segment, offset

    def _next(self, size: int) -> Segment:
        """An empty segment of at least this size: one that is there, a new one, or one that was flushed."""
        if size > self._limit_bytes:
            raise RingTooSmall(f"{size >> 20} of at most {self._limit_bytes >> 20} MiB")
        found = self._empty(size) or self._grown(size)
        if found is None:
            self.collect()
            self.flushes += 1
            found = self._empty(size)
        if found is None:  # the limit is spent on smaller segments
            kept, self._segments = self._segments, []
            found = self._grown(size)
            self._segments = self._segments or kept
        if found is None:
            raise RingTooSmall(f"{size >> 20} of at most {self._limit_bytes >> 20} MiB")
        self.current = found
        return found

    def _empty(self, size: int) -> Segment | None:
        return next((s for s in self._segments if s.used == 0 and s.size >= size), None)

    def _grown(self, size: int) -> Segment | None:
        size = max(size, self._segment_bytes)
        if self.device_bytes + size > self._limit_bytes:
            return None
        try:
            self._segments.append(new_segment(size, self.device))
        except torch.cuda.OutOfMemoryError:
            return None
        return self._segments[-1]

    def mark(self, stream: int) -> None:
        """``collect`` is to wait for what this raw stream was given so far. It does for the home stream."""
        event = self._events.get(stream)
        if event is None:
            event = self._events[stream] = StreamEvent()
        event.record(stream)

    def collect(self) -> None:
        """Bring everything to the host: one synchronisation. The current device must be this one."""
        filled = [segment for segment in self._segments if segment.used]
        stream = torch.cuda.current_stream(self.device)
        if not filled:
            return
        self.mark(self.home_stream)
        for event in self._events.values():
            event.block(stream.cuda_stream)
        while len(self._staging) < len(filled):
            self._staging.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        for index, segment in enumerate(filled):
            if self._staging[index].numel() < segment.used:
                size = min(segment.size, 1 << (segment.used - 1).bit_length())
                self._staging[index] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._staging[index][: segment.used].copy_(segment.memory[: segment.used], non_blocking=True)
        stream.synchronize()
        for staging, segment in zip(self._staging, filled, strict=False):
            segment.fill.data = ctypes.string_at(staging.data_ptr(), segment.used)
            segment.used, segment.fill = 0, Fill()
        self.current = self._segments[0]
