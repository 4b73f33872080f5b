"""Own state, generator states and changes in place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, scalar_value
from detaudit.hooks.recorder import Recorder
from tests.hooks.small_net import Net, X, record, recorder_of
from tests.support import LateDigester, RefusingDigester, call_of, paths, sites


def test_own_state_on_entry_and_what_changed_of_it() -> None:
    call = call_of(record(Net(), X), "first")
    assert dict(call.state)["buffer.count"] == digest(torch.tensor(0))
    assert dict(call.state)["attr.steps"] == scalar_value(0)
    assert dict(call.state)["attr.training"] == scalar_value(True)
    assert dict(call.out)["buffer.count"] == digest(torch.tensor(1))
    assert dict(call.out)["attr.steps"] == scalar_value(1)
    assert sites(call.out) == ["attr.steps", "buffer.count", "out"]
    assert sites(call_of(record(Net(), X), "first.linear").out) == ["out"]


def test_parameters_and_submodules_are_not_state() -> None:
    model: Any = nn.Module()
    model.tied = [nn.Parameter(torch.ones(1)), nn.Linear(2, 2), torch.ones(1)]
    model.forward = lambda: 1
    call = call_of(record(model), "")
    assert sites(call.state) == ["attr.tied[2]", "attr.training"]


def test_state_that_comes_and_goes_in_a_call() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gone: Tensor | None = torch.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            del self.gone
            self.come = x * 2
            return x

    call = call_of(record(Lazy(), X), "")
    assert dict(call.out)["attr.come"] == digest(X * 2)
    assert dict(call.out)["attr.gone"] != dict(call.state)["attr.gone"]


def test_generator_states_on_entry() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    first, second = (call_of(record(model, X), path) for path in ("0", "1"))
    assert dict(first.args)["rng.cpu"] != dict(second.args)["rng.cpu"]
    still = nn.Sequential(nn.ReLU(), nn.ReLU())
    first, second = (call_of(record(still, X), path) for path in ("0", "1"))
    assert dict(first.args)["rng.cpu"] == dict(second.args)["rng.cpu"]


def test_recording_draws_no_random_number() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    record(nn.ReLU(), X)
    assert torch.equal(torch.rand(3), expected)


def test_inputs_changed_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
            x.mul_(2)
            state["step"] = 1
            state["new"] = x
            state.pop("old")
            return x

    call = call_of(record(InPlace(), X.clone(), {"step": 0, "old": 3, "same": 4}), "")
    assert sites(call.out) == [
        "mutated.args[0]",
        "mutated.args[1].new",
        "mutated.args[1].old",
        "mutated.args[1].step",
        "out",
    ]
    assert dict(call.out)["mutated.args[0]"] == digest(X * 2)
    assert dict(call.args)["args[0]"] == digest(X)


def test_a_device_digester_is_read_after_one_finish() -> None:
    digester = LateDigester()
    recorder = Recorder(digester)
    net = Net()
    recorder.attach(net)
    with torch.no_grad(), recorder.run() as recording:
        net(X)
    assert digester.finished == 1
    with torch.no_grad():
        again = record(copy.deepcopy(net), X)
    assert paths(recording) == paths(again)
    assert sites(call_of(recording, "first").out) == ["attr.steps", "buffer.count", "out"]


def test_what_cannot_be_digested_is_listed_once_and_nothing_breaks() -> None:
    recorder = Recorder(RefusingDigester())
    net = Net()
    recorder.attach(net)
    with torch.no_grad(), recorder.run() as recording:
        net(X)
        net(X)
    assert len(recording.calls) == 10
    assert len(set(recording.unobserved)) == len(recording.unobserved)
    assert ("first", "args[0]", "RuntimeError: out of memory") in recording.unobserved


def test_large_state_is_digested_around_runs_only() -> None:
    class Cached(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1000))
            self.register_buffer("position", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.cache[0] += 1
            return x

    model = nn.Sequential(Cached())
    recorder = recorder_of(model, large_bytes=1000)
    before = recorder.large_state()
    with recorder.run() as recording:
        model(X)
    after = recorder.large_state()
    assert sites(call_of(recording, "0").state) == ["attr.training", "buffer.position"]
    assert [(path, site) for path, site, _ in recording.unobserved] == [("0", "buffer.cache")]
    assert sites(before.resolve()[0]) == ["0:buffer.cache"]
    assert before.resolve() != after.resolve()
    whole = recorder_of(model)
    assert whole.large_state().resolve() == ((), ())


# The control for in-place changes seen at all: the same module without them.
def test_a_call_that_changes_nothing_has_only_an_output() -> None:
    assert sites(record(nn.ReLU(), X).calls[0].out) == ["out"]
