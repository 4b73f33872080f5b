"""The digester for CUDA: leaf digests are computed on the current stream, without waiting for it.

A submitted tensor is digested by a kernel queued right there, after the kernel that produced it and before
whatever comes next on that stream. Digests wait in a ring on the device until ``finish`` copies them, once
per run. Under stream capture the kernels become part of the graph; see ``GraphSlots``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from detaudit.core.device.driver import DeviceUnavailable
from detaudit.core.device.queue import DeviceQueue, GraphSlots
from detaudit.core.device.ring import LIMIT_BYTES, SEGMENT_BYTES
from detaudit.core.digest import NotObservable, Pending, Ready, digest, interposed, scalar_value, unseen


class DeviceDigester:
    """Digests CUDA tensors on their device, and everything else on the host at once.

    Several threads may submit. Memory is bounded: per device a ring that starts with ``segment_bytes`` and
    grows to at most ``limit_bytes``, and as much pinned host memory.

    Raises:
        DeviceUnavailable: the kernel cannot be compiled or loaded on the device.
    """

    def __init__(
        self, device: int | None = None, *, segment_bytes: int = SEGMENT_BYTES, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._sizes = segment_bytes, limit_bytes
        self._queues: dict[int, DeviceQueue] = {}
        self._captures: dict[int, GraphSlots] = {}
        self._add_queue(torch.cuda.current_device() if device is None else device)

    def _add_queue(self, index: int) -> DeviceQueue:
        with torch.cuda.device(index), unseen():
            return self._queues.setdefault(index, DeviceQueue(index, *self._sizes))

    def _queue(self, index: int) -> DeviceQueue:
        found = self._queues.get(index)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise NotObservable(f"cuda:{index} is first used while a graph is captured")
        try:
            return self._add_queue(index)
        except (DeviceUnavailable, torch.cuda.OutOfMemoryError) as error:
            raise NotObservable(f"cuda:{index} cannot digest ({str(error).splitlines()[0]})") from error

    def submit(self, tensor: Tensor) -> Pending:
        if not interposed() and tensor.is_cuda:
            return self._submit_to(tensor.get_device(), (tensor,))[0]
        return self.submit_all((tensor,))[0]

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        """``submit`` for each, in one launch where possible: for tensors at hand at the same time."""
        if interposed():
            with unseen():
                return self._submit(tensors)
        return self._submit(tensors)

    def _submit(self, tensors: Sequence[Tensor]) -> list[Pending]:
        devices = {tensor.get_device() if tensor.is_cuda else -1 for tensor in tensors}
        if len(devices) == 1 and -1 not in devices:
            return self._submit_to(devices.pop(), tensors)
        return [self._submit((t,))[0] if t.is_cuda else Ready(digest(t)) for t in tensors]

    def _submit_to(self, index: int, tensors: Sequence[Tensor]) -> list[Pending]:
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self._submit_to(index, tensors)
        queue = self._queue(index)
        stream = torch._C._cuda_getCurrentRawStream(index)
        with queue.lock:
            planned = [queue.planned(tensor) for tensor in tensors]
            if torch._C._cuda_isCurrentStreamCapturing():
                return self._slots(queue).capture(planned, stream)
            return queue.submit(planned, stream)

    def _slots(self, queue: DeviceQueue) -> GraphSlots:
        slots = self._captures.setdefault(threading.get_ident(), GraphSlots(queue))
        if slots.device != queue.index:
            raise NotObservable(f"the graph is of cuda:{slots.device}, the tensor of another device")
        return slots

    def submit_scalar(self, scalar: object) -> Pending:
        return Ready(scalar_value(scalar))

    def finish(self) -> None:
        for queue in self._queues.values():
            queue.collect()

    def prepare_capture(self) -> None:
        """Have ready on the current device what cannot be taken while a graph is captured there."""
        with unseen():
            self._queue(torch.cuda.current_device()).refill_reserve()

    def take_capture(self) -> GraphSlots | None:
        """What this thread submitted under capture since the last call; to be called when a capture ended."""
        return self._captures.pop(threading.get_ident(), None)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held over all devices: ``device_bytes`` and ``pinned_bytes``."""
        queues = self._queues.values()
        return {
            "device_bytes": sum(queue.device_bytes for queue in queues),
            "pinned_bytes": sum(queue.ring.pinned_bytes for queue in queues),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        flushes = sum(queue.ring.flushes for queue in self._queues.values())
        limit = self._sizes[1] >> 20
        return (f"the digest ring ({limit} MiB) ran full {flushes} times and waited for the device",) * bool(
            flushes
        )
