"""Queues digests on one device: plans them, finds room for them, launches the kernel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from detaudit.core.device import plan as plans
from detaudit.core.device.driver import Kernel, StreamEvent, capture_position, copy_on_device, cubin
from detaudit.core.device.plan import Kind, Plan
from detaudit.core.device.ring import Fill, Ring, RingTooSmall, Segment, new_segment
from detaudit.core.digest import NotObservable, Pending, as_words, dtype_name, unseen, value_of
from detaudit.core.geometry import root_of
from detaudit.core.recording import Value

SLOT_SEGMENT_BYTES = 4 << 20
MAX_PLANS = 1 << 16

Planned = tuple[Plan, Tensor]
"""A plan and the tensor it is for, which lives until the kernel that reads it is queued."""


class DevicePending:
    """A digest in the ring."""

    __slots__ = ("_fill", "_offset", "_plan", "_value")

    def __init__(self, plan: Plan, fill: Fill, offset: int) -> None:
        self._plan = plan
        self._fill = fill
        self._offset = offset
        self._value: Value | None = None

    @property
    def value(self) -> Value:
        if self._value is None:
            self._value = self._read()
        return self._value

    def _read(self) -> Value:
        if self._fill.data is None:
            raise RuntimeError("the digest is still on the device; call finish() first")
        plan = self._plan
        written = self._fill.data[self._offset : self._offset + plan.out_bytes]
        if plan.kind is Kind.COPY:
            return value_of(plan.dtype, plan.shape, plan.item_bytes, written)
        return Value(root_of(plan.dtype, plan.shape, written), plan.dtype, plan.shape, written, None)


class CapturedPending:
    """A digest that became part of a graph: it has a value per replay. ``index`` is its place among them."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    @property
    def value(self) -> Value:
        raise RuntimeError("this digest was captured into a CUDA graph; each replay has a value of its own")


class DeviceQueue:
    """Kernel, ring and plans of one device. ``lock`` is held by whoever queues.

    Raises:
        DeviceUnavailable: the kernel cannot be compiled or loaded.
    """

    def __init__(self, index: int, segment_bytes: int, limit_bytes: int) -> None:
        properties = torch.cuda.get_device_properties(index)
        source = Path(plans.__file__).with_name("xxh3.cu").read_bytes()
        code = cubin(source, f"sm_{properties.major}{properties.minor}")
        self.index = index
        self.lock = threading.RLock()
        self.ring = Ring(index, segment_bytes, limit_bytes)
        self.slots = new_segment(min(SLOT_SEGMENT_BYTES, segment_bytes), index)
        self._slot_segment_bytes = self.slots.size
        self._kernel = Kernel(code, "digest_batch", index, plans.BATCH_BYTES, plans.THREADS)
        self._max_blocks = properties.multi_processor_count * self._kernel.blocks_per_multiprocessor()
        self._last_count = 0
        self._plans: dict[object, Plan | None] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def planned(self, tensor: Tensor) -> Planned:
        """The plan, and the tensor it is for: a copy where bits must be resolved or rows made contiguous."""
        dtype = tensor.dtype
        if tensor.is_conj() or tensor.is_neg():
            with unseen():
                tensor = as_words(tensor)
        plan = self._plan(tensor, dtype)
        if plan is None:
            with unseen():
                tensor = as_words(tensor).contiguous()
            plan = self._plan(tensor, dtype)
            assert plan is not None, "a contiguous tensor has contiguous rows"
        return plan, tensor

    def _plan(self, tensor: Tensor, dtype: torch.dtype) -> Plan | None:
        address = tensor.data_ptr()
        key = (dtype, tensor.shape, tensor.stride(), address & 15)
        try:
            return self._plans[key]
        except KeyError:
            pass
        if address == 0 and tensor.numel():
            raise NotObservable("its storage was freed")
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        layout = tensor.shape, tensor.stride(), tensor.element_size()
        try:
            found = plans.plan(dtype_name(dtype), *layout, address, self._max_blocks)
        except ValueError as error:
            raise NotObservable(str(error)) from error
        self._plans[key] = found
        return found

    def submit(self, planned: Sequence[Planned], stream: int) -> list[Pending]:
        """Queue digests into the ring, on a raw stream.

        Raises:
            NotObservable: a digest alone is larger than the ring.
        """
        size = 0
        for plan, _ in planned:
            size += plan.slot_bytes
        try:
            segment, offset = self.ring.reserve(size)
        except RingTooSmall as error:
            if len(planned) == 1:
                raise NotObservable(f"its leaf digests do not fit into the ring ({error})") from error
            return [self.submit([item], stream)[0] for item in planned]
        out = segment.address + offset
        self.launch(planned, out, stream)
        if stream != self.ring.home_stream:
            self.ring.mark(stream)
        pendings: list[Pending] = []
        for plan, tensor in planned:
            self.keep(tensor, stream)
            pendings.append(DevicePending(plan, segment.fill, offset))
            offset += plan.slot_bytes
        return pendings

    def keep(self, tensor: Tensor, stream: int) -> None:
        """Memory that belongs to another stream must not be reused there before the digest has run here."""
        found = self._streams.get(stream)
        if found is None:
            found = self._streams[stream] = torch.cuda.current_stream(self.index)
        tensor.record_stream(found)

    def launch(self, planned: Sequence[Planned], out: int, stream: int) -> None:
        """Queue digests, written one after the other from an address on, in as few launches as can be."""
        parameters, fill, size = self._kernel.parameters, plans.ADDRESSES.pack_into, plans.SOURCE.size
        start, blocks, count = plans.SOURCES_OFFSET, 0, 0
        for plan, tensor in planned:
            parameters[start : start + size] = plan.packed
            fill(parameters, start, tensor.data_ptr(), out, blocks)
            out += plan.slot_bytes
            blocks += plan.blocks
            start += size
            count += 1
            if count == plans.MAX_SOURCES:
                if blocks:
                    self._send(count, blocks, stream)
                start, blocks, count = plans.SOURCES_OFFSET, 0, 0
        if blocks:
            self._send(count, blocks, stream)

    def _send(self, count: int, blocks: int, stream: int) -> None:
        if count != self._last_count:
            plans.COUNT.pack_into(self._kernel.parameters, 0, count)
            self._last_count = count
        self._kernel.launch(blocks, stream)

    def reserve_slot(self, size: int) -> tuple[Segment, int]:
        """Room that stays the graph's own; allocates, from the graph's pool, only beyond the reserve."""
        if self.slots.used + size > self.slots.size:
            self.slots = new_segment(max(size, self._slot_segment_bytes), self.index)
        offset = self.slots.used
        self.slots.used = offset + size
        return self.slots, offset

    def refill_reserve(self) -> None:
        """Have room for the digests of the next graph; the current device must be this one."""
        with self.lock, unseen():
            if self.slots.used > self.slots.size // 2:
                self.slots = new_segment(self._slot_segment_bytes, self.index)

    def collect(self) -> None:
        """Bring all digests to the host, and have a reserve for the next graph. Waits for the device."""
        with self.lock, torch.cuda.device(self.index), unseen():
            self.ring.collect()
            self.refill_reserve()

    @property
    def device_bytes(self) -> int:
        return self.ring.device_bytes + self.slots.size


class GraphSlots:
    """The digests of one captured graph: every replay writes them to the same slots.

    A tensor that was digested a moment ago is not digested again: where the graph has got no node in between
    (kernels of any library would be nodes), no replay can find other bytes there. Without a graph nothing
    tells of such kernels, so that eager digests are all computed.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self.device = queue.index
        self._queue = queue
        self._digests: list[tuple[Plan, int, int]] = []
        self._ranges: list[tuple[Segment, int, int]] = []
        self._position: tuple[int | None, int] | None = None
        self._known: dict[tuple[int, int], tuple[int, Plan]] = {}
        self._last_stream = 0
        self._taken: StreamEvent | None = None

    def __len__(self) -> int:
        return len(self._digests)

    def capture(self, planned: Sequence[Planned], stream: int) -> list[Pending]:
        """Make digests part of the graph that is being captured on a raw stream."""
        if capture_position(stream) != self._position:
            self._known.clear()
        keys = [(tensor.data_ptr(), id(plan)) for plan, tensor in planned]
        fresh = {key: item for key, item in zip(keys, planned, strict=True) if key not in self._known}
        if fresh:
            self._add(fresh, stream)
            self._position = capture_position(stream)
        return [CapturedPending(self._known[key][0]) for key in keys]

    def _add(self, fresh: dict[tuple[int, int], Planned], stream: int) -> None:
        planned = list(fresh.values())
        size = sum(plan.slot_bytes for plan, _ in planned)
        segment, offset = self._queue.reserve_slot(size)
        self._queue.launch(planned, segment.address + offset, stream)
        if self._ranges and self._ranges[-1][0] is segment:
            self._ranges[-1] = (segment, self._ranges[-1][1], offset + size)
        else:
            self._ranges.append((segment, offset, offset + size))
        for key, (plan, tensor) in fresh.items():
            self._queue.keep(tensor, stream)
            self._known[key] = len(self), plan
            self._digests.append((plan, len(self._ranges) - 1, offset - self._ranges[-1][1]))
            offset += plan.slot_bytes

    def before_replay(self) -> None:
        """A replay is about to be queued on the current stream, whether or not its digests are wanted.

        CUDA orders the replays of a graph among themselves, but not the copy that follows one of them on
        its stream and a replay on another stream, which would write to the slots before they were read.
        """
        queue = self._queue
        with queue.lock:
            stream = torch._C._cuda_getCurrentRawStream(queue.index)
            if self._taken is not None and stream != self._last_stream:
                # The query gives a thread that is new to CUDA its context.
                torch.cuda.current_stream(queue.index).query()
                self._taken.block(stream)
            for segment, _, _ in self._ranges:
                queue.keep(segment.memory, stream)

    def replayed(self) -> Sequence[Pending]:
        """Keep the digests of the replay that was just queued on the current stream.

        The slots are copied into the ring in stream order, before a later replay can write to them. The
        result is in the order of submission; ``CapturedPending.index`` is the position in it.

        Raises:
            RingTooSmall: the graph holds more digests than the ring can.
        """
        queue, copies = self._queue, []
        with queue.lock, torch.cuda.device(queue.index), unseen():
            stream = torch._C._cuda_getCurrentRawStream(queue.index)
            for segment, start, end in self._ranges:
                into, offset = queue.ring.reserve(end - start)
                copy_on_device(into.address + offset, segment.address + start, end - start, stream)
                copies.append((into.fill, offset))
            queue.ring.mark(stream)
            if self._taken is None:
                self._taken = StreamEvent()
            self._taken.record(stream)
            self._last_stream = stream
        return _Replayed(self._digests, copies)


class _Replayed(Sequence[Pending]):
    """The digests of one replay, each made when it is asked for: a replay itself must cost little."""

    def __init__(self, digests: list[tuple[Plan, int, int]], copies: list[tuple[Fill, int]]) -> None:
        self._digests = digests
        self._copies = copies

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> Pending: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Pending]: ...

    def __getitem__(self, index: int | slice) -> Pending | Sequence[Pending]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        plan, number, offset = self._digests[index]
        fill, start = self._copies[number]
        return DevicePending(plan, fill, start + offset)
