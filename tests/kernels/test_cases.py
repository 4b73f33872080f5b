from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from detaudit.core.errors import CaseUnreadable, TraceNotWritten, Unsupported
from detaudit.core.recording import KernelCall
from detaudit.kernels.backend import Fill, Poison, commutes
from detaudit.kernels.cases import Case
from detaudit.kernels.layout import ALIGNMENT

BYTE_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint4,  # type: ignore[attr-defined]
]
WIDE_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint64,
    torch.complex64,
]


def bits(tensor: Tensor) -> bytes:
    """The logical elements in row-major order; read element by element, apart from the code under test."""
    storage = bytes(list(tensor.untyped_storage()))
    size = tensor.element_size()
    out = bytearray()
    for index in itertools.product(*(range(n) for n in tensor.shape)):
        at = tensor.storage_offset() + sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        out += storage[int(at) * size : (int(at) + 1) * size]
    return bytes(out)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every bit pattern, so NaN payloads and infinities too; 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize * torch.Size(shape).numel()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, strides)


def round_trip(tmp_path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    case = Case("case", "module:function", tensors, {})
    return dict(Case.load(case.save(tmp_path / "case")).tensors)


@pytest.mark.parametrize("dtype", BYTE_DTYPES + WIDE_DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_bits((3, 4), dtype)
    loaded = round_trip(tmp_path, {"x": tensor})["x"]
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, tensor.stride())
    assert bits(loaded) == bits(tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, 1:5],
        lambda x: x[1:],
        lambda x: x[0:1].expand(4, 8),
        lambda x: x.unfold(1, 3, 1),
        lambda x: x[2, 3],
        lambda x: x[:0],
        lambda x: x.view(2, 3, 8).permute(2, 0, 1),
    ],
    ids=["transposed", "columns", "offset", "expanded", "overlapping", "zero-dim", "empty", "permuted"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float4_e2m1fn_x2], ids=str)
def test_strides_and_alignment_survive(
    tmp_path: Path, make: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    tensor = make(random_bits((6, 8), dtype))
    loaded = round_trip(tmp_path, {"x": tensor})["x"]
    assert (loaded.shape, loaded.stride()) == (tensor.shape, tensor.stride())
    assert bits(loaded) == bits(tensor)
    if tensor.numel():
        assert loaded.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


def test_aliasing_survives_and_strangers_stay_apart(tmp_path: Path) -> None:
    base = torch.arange(64, dtype=torch.float32)
    tensors = {
        "row": base[4:12],
        "whole": base[:16].view(4, 4),
        "apart": base[32:40],
        "bytes": base[8:10].view(torch.uint8),
    }
    loaded = round_trip(tmp_path, tensors)
    loaded["row"].fill_(7.0)
    assert loaded["whole"].flatten()[4:12].eq(7.0).all()
    assert loaded["bytes"].view(torch.float32).eq(7.0).all()
    assert torch.equal(loaded["apart"], base[32:40])
    assert loaded["row"].data_ptr() - loaded["whole"].data_ptr() == 16


def test_a_small_slice_of_a_large_buffer_saves_only_the_slice(tmp_path: Path) -> None:
    large = torch.zeros(1 << 20, dtype=torch.float32)
    case = Case("case", "module:function", {"x": large[1000:1010]}, {})
    folder = case.save(tmp_path / "case")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 4096


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4, dtype=torch.bfloat16)
    folder = Case("case", "module:function", {"weights": tensor}, {}).save(tmp_path / "case")
    assert torch.equal(load_file(folder / "tensors.safetensors")["weights"], tensor)


def test_a_kernel_call_becomes_a_case_and_comes_back(tmp_path: Path) -> None:
    call = KernelCall(
        entry="flashinfer.fused_moe:cutlass_fused_moe",
        module="layers.3.mlp.experts",
        call=2,
        tensors={"input": torch.nn.Parameter(torch.ones(2, 2)), "quant_scales[0]": torch.ones(1).conj()},
        parameters={
            "output_dtype": "torch.bfloat16",
            "use_fused_finalize": None,
            "ids": [1, -1],
            "limit": 1e-45,
        },
        context={"flashinfer": "0.7.4", "autotuner": {"tuned": False}},
    )
    case = Case.from_kernel_call(call)
    assert case.name == "layers.3.mlp.experts#2"
    loaded = Case.load(case.save(tmp_path / "deep" / "case"))
    assert (loaded.name, loaded.entry, loaded.module, loaded.call) == (case.name, call.entry, call.module, 2)
    assert loaded.parameters == call.parameters
    assert loaded.context == {"device": "cpu", **call.context}
    assert loaded.dtype("output_dtype") is torch.bfloat16
    assert not loaded.tensors["input"].requires_grad
    assert len(loaded.group("quant_scales")) == 1
    with pytest.raises(CaseUnreadable, match="names no dtype"):
        loaded.dtype("use_fused_finalize")


def test_conjugate_and_negative_views_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j])
    call = KernelCall("m:f", "", 0, {"conj": tensor.conj(), "neg": tensor.conj().imag}, {})
    case = Case.from_kernel_call(call)
    assert case.name == "root#0"
    assert case.tensors["conj"].tolist() == [1 - 2j]
    assert case.tensors["neg"].tolist() == [-2.0]
    assert not case.tensors["conj"].is_conj()
    assert not case.tensors["neg"].is_neg()


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
def test_what_is_not_plain_memory_is_refused(tensor: Tensor) -> None:
    with pytest.raises(Unsupported, match=r"argument x .* plain strided"):
        Case("case", "m:f", {"x": tensor}, {})


def test_what_json_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="JSON"):
        Case("case", "m:f", {}, {"callback": print}).save(tmp_path / "case")
    assert list(tmp_path.iterdir()) == []


def test_a_case_is_never_overwritten(tmp_path: Path) -> None:
    case = Case("case", "m:f", {"x": torch.ones(2)}, {})
    case.save(tmp_path / "case")
    with pytest.raises(TraceNotWritten, match="exists already"):
        case.save(tmp_path / "case")


def test_a_case_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("detaudit.kernels.cases.save_file", full)
    with pytest.raises(TraceNotWritten, match="disk is full"):
        Case("case", "m:f", {"x": torch.ones(2)}, {}).save(tmp_path / "case")
    assert list(tmp_path.iterdir()) == []


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "case.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def truncate(folder: Path) -> None:
    file = folder / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def flip_a_bit(folder: Path) -> None:
    file = folder / "tensors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "case.json").unlink(), "not a kernel case"),
        (lambda f: (f / "tensors.safetensors").unlink(), "no tensors.safetensors"),
        (lambda f: (f / "case.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "case.json").write_text("[1]"), "not a detaudit-case"),
        (truncate, "damaged"),
        (flip_a_bit, "not those that were saved"),
        (lambda f: edit(f, lambda b: b.update(version=2)), "version 2, this detaudit reads 1"),
        (lambda f: edit(f, lambda b: b.pop("entry")), "damaged"),
        (lambda f: edit(f, lambda b: b["tensors"]["x"].update(dtype="float7")), "not a dtype"),
        (lambda f: edit(f, lambda b: b["tensors"]["x"].update(dtype=3)), "damaged"),
        (lambda f: edit(f, lambda b: b["tensors"]["x"].update(shape=[4, 1 << 40])), "beyond block"),
        (lambda f: edit(f, lambda b: b["tensors"]["x"].update(offset=-4)), "beyond block"),
        (lambda f: edit(f, lambda b: b["tensors"]["x"].update(block="y")), "damaged"),
        (lambda f: edit(f, lambda b: b["blocks"]["x"].update(alignment=2)), "cannot start"),
    ],
)
def test_a_damaged_case_is_one_clear_line(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = Case("case", "m:f", {"x": torch.ones(2, 4)}, {}).save(tmp_path / "case")
    damage(folder)
    with pytest.raises(CaseUnreadable, match=message) as caught:
        Case.load(folder)
    assert "\n" not in str(caught.value)


def test_a_case_without_tensors_lies_on_the_cpu(tmp_path: Path) -> None:
    case = Case.load(Case("case", "m:f", {}, {"n": 1}).save(tmp_path / "case"))
    assert case.device == torch.device("cpu")
    assert case.to(torch.device("cpu")) is case


def test_poison_reaches_every_byte_and_leaves_the_global_generator_alone() -> None:
    buffers = [
        torch.zeros(5, 3, dtype=torch.bfloat16),
        torch.zeros(64, dtype=torch.uint8)[1:20],
        torch.zeros(()),
    ]
    poison = Poison(*buffers)
    before = torch.get_rng_state()
    expected: dict[Fill, set[int]] = {"zeros": {0}, "ones": {255}}
    for fill, values in expected.items():
        poison(fill)
        assert all(set(bits(buffer)) == values for buffer in buffers)
    poison("random")
    assert all(len(set(bits(buffer))) > 1 for buffer in buffers)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_terms_commute_and_three_need_not() -> None:
    assert commutes(1) is not None
    assert "top_k is 2" in str(commutes(2))
    assert commutes(3) is None
