"""Buffers are put back: first the objects, then their contents. Everything else stays as the run left it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, parts
from detaudit.hooks.generators import survey
from detaudit.hooks.snapshot import Gradients, Restored, Snapshot


class Buffered(nn.Module):
    """One buffer of every sort a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        base = torch.arange(12.0).reshape(3, 4)
        tensors: dict[str, Tensor | None] = {
            "plain": torch.arange(6.0),
            "nothing": None,
            "base": base,
            "column": base[:, 1],
            "expanded": torch.ones(1, 3).expand(4, 3),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(3),
            "nan": torch.tensor([float("nan"), -0.0]),
            "fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            "fp8": torch.ones(4).to(torch.float8_e4m3fn),
            "conj": torch.full((3,), 1 + 2j).conj(),
            "neg": torch.full((3,), 1 + 2j).conj().imag,
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        }
        self.plain: Tensor
        self.base: Tensor
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=name != "plain")
        with torch.inference_mode():
            self.register_buffer("inference", torch.ones(3))
        self.linear.register_buffer("shared", tensors["plain"])
        self.count = 0
        self.history: list[int] = []
        self.kept = torch.zeros(2)


@pytest.fixture(scope="module", autouse=True)
def _no_prototype_warnings() -> None:
    warnings.filterwarnings("ignore", message=".*prototype|.*beta state")


def state(model: nn.Module) -> dict[str, object]:
    """Each buffer's object, geometry and bits."""
    found: dict[str, object] = {}
    for path, tensor in model.named_buffers(remove_duplicate=False):
        strides = tensor.stride() if tensor.layout is torch.strided and not tensor.is_nested else ()
        found[path] = (id(tensor), strides, [(name, digest(part)) for name, part in parts(tensor)])
    return found


def scale_in_place(model: Buffered) -> None:
    for name, tensor in model.named_buffers():
        if name in ("fp4", "fp8"):
            tensor.view(torch.uint8).add_(1)
        elif name == "expanded":
            tensor[0].add_(1)
        elif name == "inference":
            with torch.inference_mode():
                tensor.add_(1)
        elif name == "csr":
            tensor.values().mul_(3)
        else:
            tensor.mul_(3)


def replace(model: Buffered) -> None:
    model.plain = model.plain + 1
    model.nothing = torch.ones(2)
    del model.scalar
    del model.fp8
    model.fp8 = torch.zeros(1)  # a plain attribute now
    del model.base
    model.base = nn.Parameter(torch.zeros(1))
    model.register_buffer("late", torch.ones(1))


def change_geometry(model: Buffered) -> None:
    model.plain.resize_(20)
    model.base.t_()
    model.get_buffer("nan").data = torch.zeros(5, dtype=torch.float16)
    model.get_buffer("column").set_(torch.zeros(2))  # type: ignore[call-overload]
    model.get_buffer("conj").data = torch.zeros(3, dtype=torch.complex64)
    model.get_buffer("scalar").untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [scale_in_place, replace, change_geometry])
def test_objects_and_contents_are_put_back(change: Callable[[Buffered], None]) -> None:
    model = Buffered()
    before = state(model)
    snapshot = Snapshot.take(model)
    assert snapshot.restore() == Restored()
    change(model)
    if change is change_geometry:
        assert model.plain.shape == (20,)
    else:
        assert state(model) != before
    restored = snapshot.restore()
    assert restored.failed == ()
    assert state(model) == before
    assert model.nothing is None
    assert isinstance(model.base, Tensor)
    assert model.get_buffer("column").untyped_storage().data_ptr() == model.base.untyped_storage().data_ptr()


def test_replaced_removed_and_reshaped_buffers_are_named() -> None:
    model = Buffered()
    snapshot = Snapshot.take(model)
    replace(model)
    restored = snapshot.restore()
    assert set(restored.replaced) == {"plain", "nothing", "scalar", "fp8", "base"}
    assert restored.removed == ("late",)
    assert not hasattr(model, "late")
    assert "plain" not in model.state_dict()
    change_geometry(model)
    assert set(snapshot.restore().reshaped) == {"plain", "base", "nan", "column", "conj"}


def test_attributes_parameters_and_flags_stay_as_the_run_left_them() -> None:
    model = Buffered()
    snapshot = Snapshot.take(model)
    model.count += 1
    model.history.append(1)
    model.kept.add_(1)
    model.linear.eval()
    model.linear.weight.requires_grad_(False)
    with torch.no_grad():
        model.linear.bias.fill_(9)
    restored = snapshot.restore()
    assert (model.count, model.history, model.kept.tolist()) == (1, [1], [1, 1])
    assert model.linear.bias.tolist() == [9, 9]
    assert not model.linear.training
    assert restored.flags == ("linear.training", "linear.weight.requires_grad")


def test_batch_norm_repeats_only_with_a_snapshot() -> None:
    torch.manual_seed(0)
    model, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    snapshot = Snapshot.take(model)
    running = []
    for restore in (False, False, True):
        if restore:
            snapshot.restore()
        model(x)
        running.append(model.running_mean.clone() if model.running_mean is not None else x)
    assert not torch.equal(running[0], running[1])
    assert torch.equal(running[0], running[2])


def test_limits_are_kept_and_reported() -> None:
    model = nn.Module()
    model.register_buffer("small", torch.zeros(4))
    model.register_buffer("large", torch.zeros(1000))
    snapshot = Snapshot.take(model, host_bytes=100)
    model.get_buffer("small").add_(1)
    model.get_buffer("large").add_(1)
    restored = snapshot.restore()
    assert [path for path, _ in restored.failed] == ["large"]
    assert [model.get_buffer(name).sum().item() for name in ("small", "large")] == [0, 1000]
    described = json.loads(json.dumps(snapshot.describe()))
    assert described["bytes_on_host"] == 16
    assert "4000 bytes" in described["not_put_back"]["large"]


def test_an_uninitialised_buffer_is_named() -> None:
    model = nn.LazyBatchNorm1d()
    snapshot = Snapshot.take(model)
    assert set(snapshot.refused) == {"running_mean", "running_var"}


def test_several_models_are_told_apart_and_shared_modules_taken_once() -> None:
    shared = nn.BatchNorm1d(2)
    snapshot = Snapshot.take(nn.Sequential(shared), nn.Sequential(shared, nn.BatchNorm1d(2)))
    described = snapshot.describe()
    assert described["buffers"] == 6
    assert described["modules_training"] == 4


def test_modes_of_the_target_see_nothing() -> None:
    model = Buffered()
    snapshot = Snapshot.take(model)
    scale_in_place(model)
    with survey() as seen, torch.device("meta"):
        assert snapshot.restore().failed == ()
        assert Snapshot.take(model).restore().failed == ()
    assert seen.drew == {}
    assert model.plain.device.type == "cpu"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + 1  # type: ignore[has-type]
        self.written.add_(1)  # type: ignore[operator]
        return x + self.replaced + self.written  # type: ignore[no-any-return]


def test_buffers_of_torchscript_are_put_back() -> None:
    model = torch.jit.script(nn.Sequential(Counting()))
    snapshot = Snapshot.take(model)
    first = model(torch.zeros(2))
    assert not torch.equal(model(torch.zeros(2)), first), "the control: it counts"
    restored = snapshot.restore()
    assert (restored.replaced, restored.failed) == (("0.replaced",), ())
    assert torch.equal(model(torch.zeros(2)), first)


def test_gradients_that_a_run_accumulates_into_are_put_back() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(1, 1)
    model = nn.Sequential(first, second)
    first(torch.ones(2)).sum().backward()
    kept = first.weight.grad
    assert kept is not None
    gradients = Gradients(model)
    for _ in range(2):
        gradients.restore()
        model(torch.ones(2)).sum().backward()
        assert first.weight.grad is kept
    gradients.restore()
    assert torch.equal(kept, torch.ones(1, 2))
    assert second.weight.grad is None
