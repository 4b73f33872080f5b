"""The model's buffers: the original objects, and then their contents, put back before each run.

Only buffers. A counter, a list or a tensor kept as a plain attribute stays as the run left it: a user who
runs the model twice gets exactly that, and a call whose own state on entry differs between runs is what the
finding ``history-dependent`` is about. Putting attributes back would hide it. Parameters are not put back
either: a parameter that a run changes is the finding ``stateful``. Training flags and ``requires_grad`` are
never touched; they are recorded, and a change is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from detaudit.core.digest import as_words, unseen

DEVICE_BYTES = 4 << 30
HOST_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class Restored:
    """What one ``Snapshot.restore`` found and did; paths as in ``named_buffers()``.

    Args:
        replaced: buffers that were another tensor object, or none, by then.
        removed: buffers that had not been there when the snapshot was taken.
        reshaped: buffers whose size, strides, dtype or storage had been changed in place.
        failed: (path, reason) of contents that could not be put back.
        flags: modules and parameters whose training flag or ``requires_grad`` differs from then; left as is.
    """

    replaced: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()


class Snapshot:
    """Buffers of one or more models as they were when it was taken.

    Contents up to ``device_bytes`` are kept on the buffers' own device, the next ``host_bytes`` on the
    host, and what is larger not at all: ``refused`` says which. Storage shared by several buffers keeps
    being shared.
    """

    def __init__(self, modules: Mapping[str, nn.Module], device_bytes: int, host_bytes: int) -> None:
        self._modules = [_Slots(path, module) for path, module in modules.items()]
        self._contents: dict[int, _Contents] = {}
        self.refused: dict[str, str] = {}
        self.bytes_on_device = 0
        self.bytes_on_host = 0
        self._flags = _flags(modules)
        for path, tensor in self._named():
            if id(tensor) not in self._contents:
                self._keep(path, tensor, device_bytes, host_bytes)

    @classmethod
    def take(
        cls, *models: nn.Module, device_bytes: int = DEVICE_BYTES, host_bytes: int = HOST_BYTES
    ) -> Snapshot:
        """Remember every buffer object of ``models`` and a copy of its contents. Synchronises only where
        contents go from a device to the host."""
        modules: dict[str, nn.Module] = {}
        seen: set[nn.Module] = set()
        for index, model in enumerate(models):
            prefix = "" if len(models) == 1 else f"{type(model).__name__}#{index}"
            modules |= model.named_modules(memo=seen, prefix=prefix)
        return cls(modules, device_bytes, host_bytes)

    def restore(self) -> Restored:
        """Put the original buffer objects and their contents back; never raises for a single buffer."""
        replaced: list[str] = []
        removed: list[str] = []
        for slots in self._modules:
            slots.restore(replaced, removed)
        reshaped: list[str] = []
        failed = list(self.refused.items())
        for contents in self._contents.values():
            try:
                if contents.restore():
                    reshaped.append(contents.path)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                failed.append((contents.path, _first_line(error)))
        now = _flags({slots.path: slots.module for slots in self._modules})
        flags = tuple(name for name, flag in self._flags.items() if now.get(name, flag) != flag)
        return Restored(tuple(replaced), tuple(removed), tuple(reshaped), tuple(failed), flags)

    def describe(self) -> dict[str, object]:
        """What is put back, what is not and why, and the flags; JSON-compatible, for the report."""
        training = [name for name, flag in self._flags.items() if name.endswith(".training") and flag]
        gradients = [name for name, flag in self._flags.items() if name.endswith(".requires_grad") and flag]
        modules = len(self._modules)
        return {
            "buffers": len(self._contents),
            "bytes_on_device": self.bytes_on_device,
            "bytes_on_host": self.bytes_on_host,
            "not_put_back": dict(self.refused),
            "modules_training": len(training),
            "modules_eval": modules - len(training),
            "parameters_requiring_grad": len(gradients),
        }

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for slots in self._modules:
            yield from ((slots.name(key), b) for key, b in slots.buffers.items() if isinstance(b, Tensor))

    def _keep(self, path: str, tensor: Tensor, device_bytes: int, host_bytes: int) -> None:
        if isinstance(tensor, nn.parameter.UninitializedBuffer):
            self.refused[path] = "it is not initialised yet: the first run gives it its shape"
            return
        size = _bytes(tensor)
        on_host = tensor.device.type == "cpu" or self.bytes_on_device + size > device_bytes
        if on_host and self.bytes_on_host + size > host_bytes:
            self.refused[path] = f"its {size} bytes are more than the limit for copies leaves free"
            return
        try:
            self._contents[id(tensor)] = _Contents.of(path, tensor, on_host)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.refused[path] = _first_line(error)
            return
        if on_host:
            self.bytes_on_host += size
        else:
            self.bytes_on_device += size


class Gradients:
    """The ``.grad`` of every parameter as it was when this was made: the tensor, or None, and its contents.

    A run that accumulates adds to the tensor in place.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._held = [(parameter, parameter.grad) for model in models for parameter in model.parameters()]
        tensors = {id(gradient): gradient for _, gradient in self._held if gradient is not None}
        self._contents = [_Contents.of("grad", gradient, on_host=False) for gradient in tensors.values()]

    def restore(self) -> None:
        for parameter, gradient in self._held:
            parameter.grad = gradient
        for contents in self._contents:
            contents.restore()


@dataclass(slots=True)
class _Slots:
    """The names under which one module holds its buffers."""

    path: str
    module: nn.Module
    buffers: dict[str, Tensor | None] = field(init=False)
    transient: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = dict(self.module._buffers)
        self.transient = set(self.module._non_persistent_buffers_set)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def restore(self, replaced: list[str], removed: list[str]) -> None:
        current = self.module._buffers
        if not isinstance(current, dict):
            self._restore_fixed(current, replaced)
            return
        replaced.extend(self.name(k) for k, v in self.buffers.items() if current.get(k) is not v)
        removed.extend(self.name(k) for k in current if k not in self.buffers)
        current.clear()
        current.update(self.buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self.transient)
        for key in self.buffers:
            # A name that was deleted and set again as something else would hide the buffer.
            for other in (vars(self.module), self.module._parameters, self.module._modules):
                other.pop(key, None)

    def _restore_fixed(self, current: Any, replaced: list[str]) -> None:
        """TorchScript keeps buffers in C++, under names that can be neither added nor removed."""
        for key, buffer in self.buffers.items():
            if current[key] is not buffer:
                replaced.append(self.name(key))
                current[key] = buffer


@dataclass(frozen=True, slots=True)
class _Contents:
    """One buffer's geometry and bytes.

    ``alias`` shares the buffer's storage under the original geometry, so a later ``resize_``, ``set_`` or
    ``.data =`` on the buffer does not reach it.
    """

    path: str
    tensor: Tensor
    alias: Tensor
    saved: Tensor
    storage_bytes: int

    @classmethod
    def of(cls, path: str, tensor: Tensor, on_host: bool) -> _Contents:
        with _quiet(tensor):
            alias = tensor.detach()
            view = _writable(alias)
            saved = view.to(device="cpu", copy=True) if on_host else view.clone()
        return cls(path, tensor, alias, saved, _storage_bytes(alias))

    def restore(self) -> bool:
        """Returns whether the geometry had to be put back too."""
        # An inference tensor can be written under inference mode only, and a normal one only outside of it.
        with torch.inference_mode(self.tensor.is_inference()), _quiet(self.tensor):
            if not _is_plain(self.tensor):
                # The parts of such a tensor belong to the object: an alias would have parts of its own.
                self.tensor.copy_(self.saved)
                return False
            changed = self._restore_geometry()
            _writable(self.alias).copy_(self.saved)
        return changed

    def _restore_geometry(self) -> bool:
        if self.storage_bytes > _storage_bytes(self.alias):
            self.alias.untyped_storage().resize_(self.storage_bytes)
        if _geometry(self.tensor) == _geometry(self.alias):
            return False
        self.tensor.data = self.alias
        return True


def _writable(tensor: Tensor) -> Tensor:
    """A view of the same elements that can be copied from and into, bit by bit and each element once."""
    if not _is_plain(tensor) or tensor.is_quantized:
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    # Sub-byte and packed types cannot be copied as what they are. Conjugate views are copied as they read.
    return tensor if tensor.is_conj() or tensor.is_neg() else as_words(tensor)


def _is_plain(tensor: Tensor) -> bool:
    own_dispatch = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_nested and not own_dispatch


@contextmanager
def _quiet(tensor: Tensor) -> Iterator[None]:
    """Unseen by modes of the target. A tensor class with a dispatch of its own still needs that dispatch."""
    with unseen() if _is_plain(tensor) else _disable_current_modes(), torch.no_grad():
        yield


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    offset = tensor.storage_offset()
    storage = tensor.untyped_storage()._cdata
    return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), offset, storage


def _storage_bytes(tensor: Tensor) -> int:
    """-1 where the tensor has no storage of its own (sparse, some subclasses)."""
    return int(tensor.untyped_storage().nbytes()) if _is_plain(tensor) else -1


def _bytes(tensor: Tensor) -> int:
    try:
        return int(tensor.nbytes)
    except (RuntimeError, NotImplementedError):
        return max(_storage_bytes(tensor), 0)


def _flags(modules: Mapping[str, nn.Module]) -> dict[str, bool]:
    flags: dict[str, bool] = {}
    for path, module in modules.items():
        flags[f"{path}.training"] = module.training
        for name, parameter in module._parameters.items():
            if parameter is not None:
                flags[f"{path}.{name}.requires_grad"] = parameter.requires_grad
    return flags


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
