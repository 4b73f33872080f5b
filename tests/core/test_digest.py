"""The host digest: every dtype and stride, parts of what is not plain, and what it leaves alone."""

from __future__ import annotations

import ctypes
import enum
import math
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from detaudit.core.digest import (
    HostDigester,
    NotObservable,
    digest,
    dtype_name,
    make_digester,
    parts,
    scalar_value,
)
from detaudit.core.geometry import ITEM_BYTES, RAW_BYTES
from tests.core.plain_digest import pattern, plain_digests, plain_root

QUANTIZED = {"qint8", "quint8", "quint4x2", "quint2x4", "qint32"}
DTYPES = [getattr(torch, name) for name in sorted(set(ITEM_BYTES) - QUANTIZED) if hasattr(torch, name)]
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    buffer = bytearray(pattern(math.prod(shape) * dtype.itemsize, salt))
    if dtype is torch.bool:
        buffer = bytearray(byte & 1 for byte in buffer)
    flat = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def bytes_of(tensor: Tensor) -> bytes:
    """Row-major bytes, element by element: an independent way, slow."""
    size = tensor.element_size()
    storage = ctypes.string_at(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
    indices = [0]
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        indices = [index + i * stride for index in indices for i in range(length)]
    starts = [size * (index + tensor.storage_offset()) for index in indices]
    return b"".join(storage[start : start + size] for start in starts)


def check(tensor: Tensor) -> None:
    value = digest(tensor)
    expected, shape = bytes_of(tensor), tuple(tensor.shape)
    assert value.leaves == plain_digests(expected, shape, tensor.element_size())
    assert value.root.hex() == plain_root(dtype_name(tensor.dtype), expected, shape, tensor.element_size())
    assert (value.dtype, value.shape) == (dtype_name(tensor.dtype), shape)
    assert value.raw == (expected if len(expected) <= RAW_BYTES else None)


def test_every_dtype_of_torch_is_known() -> None:
    dtypes = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert {dtype_name(dtype): dtype.itemsize for dtype in dtypes}.items() <= ITEM_BYTES.items()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_every_dtype_at_any_stride(dtype: torch.dtype) -> None:
    tensor = tensor_of(dtype, (4, 6, 10))
    for view in (tensor, tensor.transpose(0, 2), tensor[1:, ::2, 3:], tensor[2, 3, 4], tensor[:, :0]):
        check(view)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype, shape, stride and offset: sliced, permuted, expanded."""
    tensor = tensor_of(draw(st.sampled_from(DTYPES)), draw(shapes), draw(st.integers(0, 255)))
    for dim in range(tensor.dim()):
        start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


@settings(max_examples=150, deadline=None)
@given(tensor=views())
def test_any_view(tensor: Tensor) -> None:
    check(tensor)


@pytest.mark.parametrize("shape", [(3, 140_001), (70_000, 3), (65_537, 1), (2, 33_000), (500, 100)])
def test_leaves_of_large_tensors(shape: tuple[int, int]) -> None:
    tensor = tensor_of(torch.int16, shape)
    check(tensor)
    check(tensor.t())


def test_conj_and_neg_bits_are_resolved() -> None:
    tensor = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    conj, neg = tensor.conj(), tensor.conj().imag
    assert conj.is_conj()
    assert neg.is_neg()
    assert digest(conj) == digest(torch.complex(tensor.real, -tensor.imag))
    assert digest(neg) == digest(-tensor.imag)
    assert digest(conj) != digest(tensor)


def test_values_that_are_equal_can_have_other_bits() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    quiet, payload = (
        torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)
    )
    assert digest(quiet) != digest(payload)


def test_the_documented_recomputation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "digest.md").read_text()
    block = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    code, printed = block.groups()
    assert len(code.splitlines()) <= 12
    shown: list[str] = []
    names: dict[str, Any] = {"print": shown.append}
    exec(code, names)
    assert shown == printed.split()
    assert digest(torch.zeros(4)).root.hex() == shown[0]
    for shape in [(), (0, 4), (3, 0), (2, 255), (2, 256), (2, 65537), (65536, 3), (65537, 3), (70000, 255)]:
        tensor = tensor_of(torch.uint8, shape)
        data = bytes(tensor.flatten().tolist()) if tensor.numel() < 1000 else tensor.numpy().tobytes()
        assert names["root"]("uint8", shape, 1, data) == digest(tensor).root.hex()


class Wrapper(torch.Tensor):
    """A wrapper subclass around one tensor, that fails on every operation."""

    tensor: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.tensor = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was run on a wrapper")


class Flattening(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["tensor"], None


class Plain(torch.Tensor):
    """A subclass that has storage of its own and sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was run on a subclass")


def nested(layout: torch.layout) -> Tensor:
    rows = [torch.ones(2, 3), torch.zeros(1, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(rows, layout=layout)


def quantized() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3, 4), 0.5, 3, torch.qint8)


def sparse(kind: str) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = getattr(torch.eye(4), f"to_sparse_{kind}" if kind != "coo" else "to_sparse")
        return method((2, 2)) if kind.startswith("bs") else method()  # type: ignore[no-any-return]


COMPRESSED_ROWS = [".size", ".crow_indices", ".col_indices", ".values"]
COMPRESSED_COLUMNS = [".size", ".ccol_indices", ".row_indices", ".values"]


@pytest.mark.parametrize(
    ("make", "suffixes"),
    [
        (lambda: torch.ones(3), [""]),
        (lambda: torch.nn.Parameter(torch.ones(3)), [""]),
        (lambda: torch.ones(3).as_subclass(Plain), [""]),
        (lambda: sparse("coo"), [".size", ".indices", ".values"]),
        (lambda: sparse("csr"), COMPRESSED_ROWS),
        (lambda: sparse("bsr"), COMPRESSED_ROWS),
        (lambda: sparse("csc"), COMPRESSED_COLUMNS),
        (lambda: sparse("bsc"), COMPRESSED_COLUMNS),
        (lambda: nested(torch.strided), ["[0]", "[1]"]),
        (quantized, [".int_repr", ".scale", ".zero_point"]),
        (lambda: Flattening(Flattening(torch.ones(3))), [".tensor.tensor"]),
        (lambda: Flattening(sparse("coo")), [".tensor.size", ".tensor.indices", ".tensor.values"]),
    ],
)
def test_parts(make: Callable[[], Tensor], suffixes: list[str]) -> None:
    found = parts(make())
    assert [suffix for suffix, _ in found] == suffixes
    for _, part in found:
        assert type(part) is Tensor
        check(part)


def test_parts_of_a_jagged_tensor() -> None:
    found = dict(parts(nested(torch.jagged)))
    assert found["._values"].shape == (3, 3)
    assert found["._offsets"].tolist() == [0, 2, 3]


def test_sparse_tensors_are_not_coalesced() -> None:
    indices = torch.tensor([[0, 0], [1, 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (2, 2), check_invariants=True)
    assert dict(parts(tensor))[".values"].tolist() == [1.0, 2.0]


def freed() -> Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3, device="meta"), "it is a meta tensor and has no bytes"),
        (fake, "FakeTensor has no bytes of its own"),
        (freed, "Tensor has no bytes of its own"),
        (lambda: Wrapper(torch.ones(3)), "Wrapper has no storage that can be read"),
        (lambda: torch.nn.LazyLinear(3).weight, "it is not initialized yet"),
    ],
)
def test_not_observable(make: Callable[[], Tensor], reason: str) -> None:
    with pytest.raises(NotObservable) as raised:
        parts(make())
    assert raised.value.reason == reason
    with pytest.raises(NotObservable):
        digest(make())


def test_inside_function_transforms() -> None:
    plain, seen = torch.ones(3, 2).t(), []

    def function(x: Tensor) -> Tensor:
        with pytest.raises(NotObservable, match=r"torch\.func"):
            parts(x)
        seen.append(digest(plain))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(3, 2))
    assert seen == [digest(plain)] * 2


class FunctionLog(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class DispatchLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_nothing_and_stay_on() -> None:
    tensors = [torch.ones(3, 4).t(), sparse("csr"), quantized(), nested(torch.strided)]
    with FunctionLog() as functions, DispatchLog() as operators:
        for tensor in tensors:
            for _, part in parts(tensor):
                digest(part)
        assert functions.seen == []
        assert operators.seen == []
        torch.ones(2) + 1
        assert functions.seen
        assert operators.seen


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float16)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_defaults_of_the_target_do_not_matter(odd_defaults: None) -> None:
    tensor = torch.ones(3, 4, device="cpu", dtype=torch.float32)
    check(tensor.t())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dict(parts(tensor.to_sparse()))
    assert found[".size"].tolist() == [3, 4]
    assert digest(found[".values"]).dtype == "float32"


def test_gradients_are_left_alone() -> None:
    tensor = torch.ones(3, requires_grad=True)
    product = tensor * 2
    version = product._version
    digest(product)
    assert (product._version, product.requires_grad, torch.is_grad_enabled()) == (version, True, True)
    with torch.inference_mode():
        check(torch.ones(3, 2).t())


def test_parts_of_an_ordinary_tensor_are_itself() -> None:
    tensor = torch.ones(3, 2)
    parts(tensor)
    ((suffix, part),) = parts(tensor)
    assert suffix == ""
    assert part is tensor
    assert parts(torch.empty(0))[0][1].numel() == 0
    assert digest(parts(tensor.to(torch.complex64).conj())[0][1]) == digest(tensor.to(torch.complex64).conj())


def test_threads_do_not_disturb_each_other() -> None:
    tensors = [tensor_of(torch.uint8, (200, 257), salt) for salt in range(8)]
    expected = [digest(tensor) for tensor in tensors]
    found: dict[int, list[object]] = {}

    def work(first: int) -> None:
        found[first] = [digest(tensors[(first + i) % 8]) for i in range(40)]

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[first] == [expected[(first + i) % 8] for i in range(40)] for first in range(4))


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 1


def test_scalars_are_told_apart() -> None:
    nans = [struct.unpack(">d", bytes.fromhex(h))[0] for h in ("7ff8000000000000", "7ff8000000000001")]
    scalars = [
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            10**30,
            10**5000,
            0.0,
            -0.0,
            1.0,
            0.1,
            math.inf,
            *nans,
            1j,
            -1j,
            -0.0j,
        ),
        *("", "1", "None", "é\ud800", b"", b"1", "x" * 5000, slice(1, None), range(3), Color.RED, Level.HIGH),
        *(torch.float32, torch.float16, torch.device("cpu"), torch.strided, torch.channels_last),
    ]
    values = [scalar_value(scalar) for scalar in scalars]
    assert len({value.root for value in values}) == len(scalars)
    assert values == [scalar_value(scalar) for scalar in scalars]
    assert scalar_value("é").raw == "é".encode()
    assert scalar_value("x" * 5000).raw is None
    assert scalar_value(3).dtype == "python.int"


def test_a_scalar_is_digested_by_its_text() -> None:
    value = scalar_value(12)
    assert value.leaves == plain_digests(b"12", (2,), 1)
    assert value.shape == ()


def test_numpy_scalars() -> None:
    numpy = pytest.importorskip("numpy")
    assert scalar_value(numpy.float32(1)) != scalar_value(numpy.float16(1))
    assert scalar_value(numpy.float32(1)).dtype == "python.numpy.float32"


def test_what_is_no_scalar() -> None:
    with pytest.raises(NotObservable, match="object is neither a tensor nor a scalar"):
        scalar_value(object())


def test_host_digester() -> None:
    digester = make_digester("cpu")
    assert isinstance(digester, HostDigester)
    tensor = torch.ones(3)
    before = digester.submit(tensor)
    tensor.zero_()
    after, scalar = digester.submit(tensor), digester.submit_scalar(3)
    digester.finish()
    assert before.value == digest(torch.ones(3))
    assert after.value == digest(torch.zeros(3))
    assert scalar.value == scalar_value(3)
    assert [pending.value for pending in digester.submit_all([tensor, tensor])] == [after.value] * 2
    assert digester.notes == ()
