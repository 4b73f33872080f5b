"""Recording among torch's own machinery: modes, transforms, checkpoints, defaults, patched methods."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from detaudit.core.digest import HostDigester, digest
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import call_of, paths, sites

X = torch.arange(8.0).view(2, 4)


def model_() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))


def record(model: nn.Module, x: Tensor = X) -> Recording:
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        model(x)
    return recording


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_of_the_target_see_the_same_operators(mode: Any) -> None:
    plain, recorded, model = mode(), mode(), model_()
    with plain:
        model(X)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording, recorded:
        model(X)
    assert recorded.seen == plain.seen
    assert plain.seen
    assert recording.unobserved == ()


def test_batch_norm_and_in_place_layers() -> None:
    recording = record(model_())
    assert sites(call_of(recording, "1").out) == [
        "buffer.num_batches_tracked",
        "buffer.running_mean",
        "buffer.running_var",
        "out",
    ]
    assert sites(call_of(recording, "2").out) == ["mutated.args[0]", "out"]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")])
def test_contexts(context: Any) -> None:
    model = model_().eval()
    with context():
        expected = model(X)
        recording = record(model)
    assert dict(recording.final)["out"] == digest(expected)
    assert recording.unobserved == ()


def test_a_default_device_and_dtype() -> None:
    model = model_().eval()
    plain = record(model)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert record(model).calls == plain.calls
    finally:
        torch.set_default_dtype(torch.float32)


def test_transforms_are_listed_not_broken() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    batch = torch.stack([X, X + 1])
    expected = torch.func.vmap(model)(batch)
    with recorder.run() as recording:
        out = torch.func.vmap(model)(batch)
        torch.func.grad(lambda x: model(x).sum())(X)
    assert torch.equal(out, expected)
    assert ("0", "out") in {(path, site) for path, site, _ in recording.unobserved}
    assert paths(recording) == ["", "0", "1"] * 2


def test_functional_call_sees_the_parameters_it_was_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        torch.func.functional_call(model, zeros, (X,))
    assert dict(call_of(recording, "0").out)["out"] == digest(torch.zeros(2, 4))


def test_fake_tensors_are_not_recorded() -> None:
    with Recorder(HostDigester()).run() as recording, FakeTensorMode():
        nn.Linear(4, 4)(torch.zeros(1, 4))
    assert recording.calls == []


def test_meta_tensors_are_listed() -> None:
    recording = record(nn.ReLU(), torch.zeros(2, device="meta"))
    assert [(path, site) for path, site, _ in recording.unobserved] == [("", "args[0]"), ("", "out")]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_in_backward(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed()

    def step() -> list[Tensor]:
        model.zero_grad()
        model(X.clone().requires_grad_()).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = step()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    calls = []
    for _ in range(2):
        with recorder.run() as recording:
            recorded = step()
        calls.append(recording.calls)
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert [(c.module, c.ordinal) for c in calls[0]][-3:][0] == ("inner", 1)
    assert [(c.module, c.out) for c in calls[0]] == [(c.module, c.out) for c in calls[1]]


def test_lazy_modules() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    first, second = record(model), record(model)
    assert paths(first) == paths(second) == ["", "0", "1"]
    assert first.final == second.final


def test_methods_that_the_target_patches_stay_patched() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def patched(self: nn.Module, x: Tensor) -> Tensor:
        return x + 1

    with Recorder(HostDigester()).run() as recording:
        Mine()(X)
        Mine.forward = patched  # type: ignore[method-assign]
        assert torch.equal(Mine()(X), X + 1)
    assert Mine.forward is patched
    assert len(recording.calls) == 2


def test_a_forward_patched_on_an_instance_is_seen() -> None:
    model = nn.Sequential(nn.ReLU())
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 1
    recording = record(model)
    assert paths(recording) == ["", "0"]
    assert dict(recording.final)["out"] == digest(X + 1)


def test_signatures_sources_copies_and_pickles() -> None:
    model = nn.Linear(4, 4)
    signature, source = inspect.signature(model.forward), inspect.getsource(type(model).forward)
    with Recorder(HostDigester()).run():
        assert inspect.signature(model.forward) == signature
        assert inspect.getsource(type(model).forward) == source
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(X), model(X))
    assert torch.equal(again(X), model(X))


def test_nothing_but_the_class_is_wrapped() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = [set(vars(member)) for member in model.modules()]
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run():
        model(X)
        assert [set(vars(member)) for member in model.modules()] == before
        assert all(not member._forward_hooks for member in model.modules())


def test_hugging_face_style_configuration_is_listed_and_skipped() -> None:
    class Config:
        def __init__(self) -> None:
            self.hidden_size = 4

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Config()

        def forward(self, x: Tensor) -> Tensor:
            return x

    recording = record(Attention())
    assert [(path, site) for path, site, _ in recording.unobserved] == [("", "attr.config")]
    assert sites(recording.calls[0].state) == ["attr.training"]
