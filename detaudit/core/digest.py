"""The identity of tensors and host scalars: parts, digest, digesters.

Nothing here changes what a target sees: torch function modes, dispatch modes and functorch's interpreter are
off while it runs, no gradient is recorded, and devices and dtypes are passed explicitly (a target may have
set a default device).
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from detaudit.core.geometry import ITEM_BYTES, RAW_BYTES, leaf_digests, root_of
from detaudit.core.recording import SCALAR_PREFIX, Value

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class NotObservable(Exception):
    """A value whose bytes cannot be read. ``reason`` is one short clause for the coverage report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class unseen(contextlib.ContextDecorator):
    """Torch function modes, dispatch modes, functorch and autograd are off inside.

    Entered twice for every recorded call, so it is spelled out: torch's own ``no_grad`` alone takes longer.
    """

    __slots__ = ("_grad", "_guards")

    def _recreate_cm(self) -> unseen:
        return unseen()  # as a decorator: calls may overlap

    def __enter__(self) -> None:
        off: list[Any] = [torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()]
        if torch._C._functorch.peek_interpreter_stack() is not None:
            off.append(torch._C._DisableFuncTorch())
        for guard in off:
            guard.__enter__()
        self._guards = off
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        _inside.depth += 1

    def __exit__(self, *error: object) -> None:
        _inside.depth -= 1
        torch._C._set_grad_enabled(self._grad)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


class Pending(Protocol):
    """A digest that may not have been computed yet."""

    @property
    def value(self) -> Value:
        """The digest; on a device only after the digester's ``finish()``, before it a RuntimeError."""
        ...


class Digester(Protocol):
    """Takes values as a run produces them and has their digests when the run is over."""

    def submit(self, tensor: Tensor) -> Pending:
        """Digest a plain tensor (see ``parts``) as its bytes are now, later changes not included.

        Raises:
            NotObservable: its bytes cannot be read.
        """
        ...

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        """``submit`` for each; on a device in one launch where possible, which is cheaper."""
        ...

    def submit_scalar(self, scalar: object) -> Pending:
        """Digest a host scalar (see ``scalar_value``)."""
        ...

    def finish(self) -> None:
        """Make every pending digest readable, with one synchronisation at most; once per run."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know about how digests were taken (a fallback, a limit)."""
        ...


class Ready:
    """A pending digest that is there already."""

    __slots__ = ("value",)

    def __init__(self, value: Value) -> None:
        self.value = value


class HostDigester:
    """Digests at once, on the host. A tensor on a device is copied to the host first, which synchronises."""

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self._notes = notes

    def submit(self, tensor: Tensor) -> Ready:
        return Ready(digest(tensor))

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        return [self.submit(tensor) for tensor in tensors]

    def submit_scalar(self, scalar: object) -> Ready:
        return Ready(scalar_value(scalar))

    def finish(self) -> None:
        pass

    @property
    def notes(self) -> tuple[str, ...]:
        return self._notes


def make_digester(device: torch.device | str) -> Digester:
    """The digester for a target that computes on this device.

    For CUDA one that digests on the device; where that cannot run, a host digester whose ``notes`` say so.
    """
    with unseen():
        wanted = torch.device(device)
        if wanted.type != "cuda":
            return HostDigester()
        from detaudit.core.device.digester import DeviceDigester
        from detaudit.core.device.driver import DeviceUnavailable

        try:
            return DeviceDigester(wanted.index)
        except (DeviceUnavailable, torch.cuda.OutOfMemoryError) as error:
            reason = str(error).splitlines()[0]
            return HostDigester(
                (f"CUDA tensors were copied to the host to be digested, which waits each time: {reason}",)
            )


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def interposed() -> bool:
    """Whether a mode or a transform would see what is done to plain tensors, so that ``unseen`` is needed."""
    return (
        torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


_ordinary_keys: set[int] = set()
"""Dispatch key sets of tensors that turned out to be plain; sparse, wrapped and lazy ones have others."""


def parts(tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The plain strided tensors that a tensor consists of, with the suffix of each one's site.

    A plain tensor is its own only part, with an empty suffix. Wrapper subclasses give the tensors named by
    ``__tensor_flatten__``; sparse tensors their indices and values as stored (coalescing would add up
    values, in an order of its own); nested tensors one part per component; quantized tensors their integers
    and parameters.

    Raises:
        NotObservable: none of these applies (meta tensors, opaque storage, unknown subclasses).
    """
    if not interposed() and type(tensor) is Tensor and is_ordinary(tensor) and tensor.data_ptr() != 0:
        return [("", tensor)]
    with unseen():
        return list(_parts(tensor, ""))


def is_ordinary(tensor: Tensor) -> bool:
    """Whether the tensor is certainly its own only part; ``parts`` finds out about others."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    if keys in _ordinary_keys:
        return True
    ordinary = (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )
    if ordinary:
        _ordinary_keys.add(keys)
    return ordinary


def _parts(tensor: Tensor, suffix: str) -> Iterator[tuple[str, Tensor]]:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotObservable("it is inside a torch.func transform")
    if torch._is_functional_tensor(tensor):
        raise NotObservable("it is a functional tensor of a tracer")
    inner = _components(tensor)
    if inner is None:
        yield suffix, _plain(tensor)
        return
    for name, part in inner:
        yield from _parts(part, suffix + name)


def _components(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """Named tensors that make up a tensor which is not a strided one itself, else None."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return _wrapped(tensor)
    if tensor.layout in _SPARSE_PARTS:
        size = torch.tensor(tensor.shape, dtype=torch.int64, device="cpu")
        names = _SPARSE_PARTS[tensor.layout]
        return [(".size", size), *((f".{name.lstrip('_')}", getattr(tensor, name)()) for name in names)]
    if tensor.is_nested:
        return [(f"[{i}]", part) for i, part in enumerate(tensor.unbind())]
    if tensor.is_quantized:
        return _quantized(tensor)
    return None


def _wrapped(tensor: Tensor) -> list[tuple[str, Tensor]]:
    try:
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return [(f".{name}", getattr(tensor, name)) for name in names]
    except Exception as error:
        raise NotObservable(f"{type(tensor).__name__} cannot be flattened ({error})") from error


def _quantized(tensor: Tensor) -> list[tuple[str, Tensor]]:
    try:
        integers = tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu")
            zero_point = torch.tensor(tensor.q_zero_point(), dtype=torch.int64, device="cpu")
        else:
            scale, zero_point = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    except RuntimeError as error:
        raise NotObservable(f"its quantization ({dtype_name(tensor.dtype)}) cannot be taken apart") from error
    return [(".int_repr", integers), (".scale", scale), (".zero_point", zero_point)]


def _plain(tensor: Tensor) -> Tensor:
    """The tensor without subclass, Python key or history; its bytes can be read."""
    if torch.nn.parameter.is_lazy(tensor):
        raise NotObservable("it is not initialized yet")
    try:
        plain = Tensor.detach(tensor)
        storage = plain.untyped_storage()
        readable = storage.device.type != "meta" and (storage.data_ptr() != 0 or plain.numel() == 0)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise NotObservable(f"{type(tensor).__name__} has no storage that can be read") from error
    if not readable:
        kind = "it is a meta tensor" if tensor.is_meta else type(tensor).__name__
        raise NotObservable(
            f"{kind} and has no bytes" if tensor.is_meta else f"{kind} has no bytes of its own"
        )
    if dtype_name(plain.dtype) not in ITEM_BYTES:
        raise NotObservable(f"its dtype {plain.dtype} is unknown")
    return plain


def as_words(tensor: Tensor) -> Tensor:
    """The same bits with conj and neg bits resolved and an integer dtype, so that any operator takes it.

    Packed and sub-byte types cannot be copied by torch under their own dtype; the integer view of the same
    element size can, and keeps every stride.
    """
    resolved = tensor.resolve_conj().resolve_neg()
    integer = _SAME_SIZE_INTEGER.get(resolved.element_size())
    return resolved if integer is None else resolved.view(integer)


def host_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied: valid while the caller holds the tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def digest(tensor: Tensor) -> Value:
    """Digest of a plain strided tensor, computed on the host (``parts`` makes plain ones of others).

    Raises:
        NotObservable: its bytes cannot be read.
    """
    if type(tensor) is Tensor and not torch.is_grad_enabled() and not interposed():
        return _digest(tensor)
    with unseen():
        return _digest(tensor)


def _digest(tensor: Tensor) -> Value:
    plain = _plain(tensor)
    dtype, shape = dtype_name(plain.dtype), tuple(plain.shape)
    held = as_words(plain).to(device="cpu").contiguous()
    return value_of(dtype, shape, held.element_size(), host_bytes(held))


def value_of(dtype: str, shape: tuple[int, ...], item_bytes: int, buffer: bytes | memoryview) -> Value:
    """Value of a tensor of which the row-major bytes are given."""
    leaves = leaf_digests(buffer, shape, item_bytes)
    raw = bytes(buffer) if len(buffer) <= RAW_BYTES else None
    return Value(root_of(dtype, shape, leaves), dtype, shape, leaves, raw)


def scalar_value(scalar: object) -> Value:
    """Value of a host scalar: its type and its text.

    Taken are None, bool, int, float, complex, str, bytes, enum members, NumPy scalars, slices, ranges, and
    torch's dtypes, devices, layouts and memory formats. Floats are told apart by their bits: -0.0 from 0.0,
    and NaN payloads.

    Raises:
        NotObservable: anything else.
    """
    kind, text = _scalar_text(scalar)
    dtype, raw = SCALAR_PREFIX + kind, text.encode("utf-8", "surrogatepass")
    leaves = leaf_digests(raw, (len(raw),), 1)
    return Value(root_of(dtype, (), leaves), dtype, (), leaves, raw if len(raw) <= RAW_BYTES else None)


def _scalar_text(scalar: object) -> tuple[str, str]:
    for base, text in _SCALARS:
        if isinstance(scalar, base):
            return base.__name__, text(scalar)
    if type(scalar).__module__ == "numpy" and hasattr(scalar, "dtype") and hasattr(scalar, "tobytes"):
        return f"numpy.{scalar.dtype.name}", str(scalar.tobytes().hex())
    raise NotObservable(f"{type(scalar).__name__} is neither a tensor nor a scalar")


def _float_text(number: float) -> str:
    if number == number:
        return repr(number)
    return f"nan:{struct.pack('>d', number).hex()}"


_SCALARS: tuple[tuple[type, Callable[[Any], str]], ...] = (
    (type(None), repr),
    (bool, lambda x: repr(bool(x))),
    (enum.Enum, lambda x: f"{type(x).__qualname__}.{x.name}"),
    (int, lambda x: hex(int(x)) if abs(int(x)) >= 1 << 64 else repr(int(x))),
    (float, lambda x: _float_text(float(x))),
    (complex, lambda x: f"{_float_text(x.real)} {_float_text(x.imag)}"),
    (str, str),
    (bytes, lambda x: bytes(x).hex()),
    (slice, repr),
    (range, repr),
    (torch.dtype, str),
    (torch.device, str),
    (torch.layout, str),
    (torch.memory_format, str),
)
"""Checked in this order: a bool is an int, and an IntEnum member too. Huge ints have no repr limit in hex."""
