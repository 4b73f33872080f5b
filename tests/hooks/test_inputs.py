"""A run gets copies of its inputs that compute the same, and changes to them are told."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, parts
from detaudit.hooks.inputs import InputCopies


@dataclass
class Batch:
    ids: Tensor
    extra: dict[str, Any]


Pair = namedtuple("Pair", ["left", "right"])


def layouts() -> dict[str, Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "plain": base,
        "transposed": base.t(),
        "offset": base[1:, 2:5],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "overlapping": torch.arange(6.0).as_strided((3, 4), (1, 1)),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(-0.0),
        "conj": torch.full((2,), 1 + 2j, dtype=torch.complex128).conj(),
        "neg": torch.full((2,), 1 + 2j).conj().imag,
        "fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "fp8": torch.ones(3).to(torch.float8_e5m2),
        "bool": torch.tensor([True, False]),
        "grad": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }


@pytest.mark.parametrize("name", layouts())
def test_a_copy_has_the_same_bits_and_geometry_and_other_memory(name: str) -> None:
    original = layouts()[name]
    copies = InputCopies(original)
    twin = copies.value
    assert twin is not original
    assert (type(twin), twin.dtype, twin.requires_grad) == (
        type(original),
        original.dtype,
        original.requires_grad,
    )
    assert [digest(p) for _, p in parts(twin)] == [digest(p) for _, p in parts(original)]
    if original.layout is torch.strided and not original.is_nested:
        assert twin.stride() == original.stride()
        assert twin.storage_offset() == original.storage_offset()
        assert (twin.is_conj(), twin.is_neg()) == (original.is_conj(), original.is_neg())
        if original.numel():
            assert twin.data_ptr() != original.data_ptr()
    assert copies.mutated() == ()
    assert copies.notes == []


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    base = torch.zeros(4, 4)
    copies = InputCopies((base, {"row": base[1]}, [base, base]))
    value = copies.value
    value[1]["row"].fill_(5)
    assert value[0][1].tolist() == [5] * 4
    assert value[2][0] is value[0]
    assert value[2][1] is value[0]
    assert base.sum() == 0
    assert copies.mutated() == ("inputs[0]", "inputs[1].row")


def test_nested_containers_are_copied_with_their_types() -> None:
    batch = Batch(torch.ones(2), {"mask": torch.zeros(2), "more": [Pair(torch.ones(1), 3)]})
    copies = InputCopies(OrderedDict(batch=batch, n=4))
    value = copies.value
    assert type(value) is OrderedDict
    assert type(value["batch"]) is Batch
    assert type(value["batch"].extra["more"][0]) is Pair
    value["batch"].extra["more"].append("changed by the run")
    value["batch"].extra["mask"].add_(1)
    value["batch"].ids.resize_(1)
    assert len(batch.extra["more"]) == 1
    assert set(copies.mutated()) == {"inputs.batch.ids", "inputs.batch.extra.mask"}


def test_parameters_modules_and_generators_are_handed_on() -> None:
    layer, generator = nn.Linear(2, 2), torch.Generator()
    copies = InputCopies({"weight": layer.weight, "layer": layer, "generator": generator, "x": torch.ones(2)})
    assert copies.value["weight"] is layer.weight
    assert copies.value["layer"] is layer
    assert copies.value["generator"] is generator
    with torch.no_grad():
        layer.weight.add_(1)
    assert copies.mutated() == ()


def test_a_nan_that_stays_is_no_change_and_a_sign_of_zero_is_one() -> None:
    x, z = torch.tensor([float("nan")]), torch.tensor([0.0])
    copies = InputCopies((x, z, torch.tensor([complex("nan")], dtype=torch.complex128)))
    assert copies.mutated() == ()
    copies.value[1].neg_()
    assert copies.mutated() == ("inputs[1]",)


def test_an_in_place_model_repeats_only_on_copies() -> None:
    inputs = torch.ones(3)
    control = [inputs.mul_(2).sum().item() for _ in range(2)]
    assert control[0] != control[1]
    repeated = [InputCopies(inputs).value.mul_(2).sum().item() for _ in range(2)]
    assert repeated[0] == repeated[1]


def test_what_cannot_be_copied_is_shared_and_named() -> None:
    lock = threading.Lock()
    copies = InputCopies({"lock": [lock], "x": torch.ones(1)})
    assert copies.value["lock"][0] is lock
    assert [path for path, _ in copies.notes] == ["inputs.lock[0]"]
    copies.value["x"].zero_()
    assert copies.mutated() == ("inputs.x",)


def test_a_gradient_history_is_left_behind_and_named() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    copies = InputCopies(x)
    assert copies.value.is_leaf
    assert copies.value.requires_grad
    assert [reason for _, reason in copies.notes] == ["it has a gradient history, which the copy has not"]


def test_inference_tensors_stay_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    assert InputCopies(x).value.is_inference()
