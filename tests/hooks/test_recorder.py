"""One recorded run: which calls, in which order, and what passes through unchanged."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester, digest, scalar_value
from detaudit.core.errors import UsageError
from detaudit.core.recording import ModuleInfo
from detaudit.hooks.recorder import Recorder
from tests.hooks.small_net import Block, Net, X, record, recorder_of
from tests.support import call_of, paths, sites


def test_calls_in_execution_order_with_parents() -> None:
    recording = record(Net(), X)
    assert [(c.module, c.cls, c.ordinal, c.parent, c.via, c.error) for c in recording.calls] == [
        ("", "Net", 0, -1, "call", None),
        ("first", "Block", 0, 0, "call", None),
        ("first.linear", "Linear", 0, 1, "call", None),
        ("second", "Block", 0, 0, "call", None),
        ("second.linear", "Linear", 0, 3, "call", None),
    ]
    assert recording.unobserved == ()


def test_inputs_outputs_and_kwargs() -> None:
    net = Net()
    with torch.no_grad():
        expected = net.first.linear(X)
    call = call_of(record(net, X), "first")
    args, out = dict(call.args), dict(call.out)
    assert args["args[0]"] == digest(X)
    assert args["kwargs.scale"] == scalar_value(2.0)
    assert out["out"] == digest(expected * 2)


def test_child_called_as_forward_is_one_call() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.child.forward(x) + self.child(x)
            return out

    recording = record(Parent(), X)
    assert [(c.module, c.ordinal, c.via) for c in recording.calls] == [
        ("", 0, "call"),
        ("child", 0, "forward"),
        ("child.linear", 0, "call"),
        ("child", 1, "call"),
        ("child.linear", 1, "call"),
    ]


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Mixin:
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)  # type: ignore[misc]
        return out * 2


class Mixed(Mixin, Base):
    pass


class OwnCall(Base):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * 3


@pytest.mark.parametrize("cls", [Base, Derived, Mixed, OwnCall])
def test_base_classes_methods_are_steps_of_one_call(cls: type[nn.Module]) -> None:
    model = cls()
    recording = record(model, X)
    assert paths(recording) == [""]
    assert dict(recording.calls[0].out)["out"] == digest(model(X))
    with recorder_of(model).run() as direct:
        model.forward(X)
    assert [c.via for c in direct.calls] == ["forward"]


def test_recursion_is_recorded() -> None:
    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                return x
            out: Tensor = self(x, depth - 1) if depth % 2 else self.forward(x, depth - 1)
            return out

    recording = record(Recursive(), X, 3)
    assert [(c.ordinal, c.parent, c.via) for c in recording.calls] == [
        (0, -1, "call"),
        (1, 0, "call"),
        (2, 1, "forward"),
        (3, 2, "call"),
    ]


def test_only_and_exclude() -> None:
    recording = record(Net(), X, only=["*linear", ""])
    assert [(c.module, c.parent) for c in recording.calls] == [
        ("", -1),
        ("first.linear", 0),
        ("second.linear", 0),
    ]
    recording = record(Net(), X, exclude=["first*", ""])
    assert [(c.module, c.parent) for c in recording.calls] == [("second", -1), ("second.linear", 0)]
    assert sites(recording.final) == ["out"], "the outermost output is there all the same"


def test_the_final_output() -> None:
    net = Net()
    recording = record(net, X)
    assert recording.final == tuple(e for e in recording.calls[0].out if e[0].startswith("out"))


def test_the_final_outputs_of_several_calls() -> None:
    net = Net()
    with torch.no_grad(), recorder_of(net).run() as recording:
        net(X)
        net(X + 1)
        net.first(X)
    assert sites(recording.final) == ["call[0].out", "call[1].out", "first.out"]


def test_exceptions_pass_unchanged_and_the_recording_is_there() -> None:
    error = ValueError("mine")

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            raise error

    recorder = Recorder(HostDigester())
    with pytest.raises(ValueError, match="mine") as raised, recorder.run() as recording:
        nn.Sequential(nn.ReLU(), Fails())(X.clone())
    assert raised.value is error
    assert [(c.cls, c.error) for c in recording.calls] == [
        ("Sequential", "ValueError"),
        ("ReLU", None),
        ("Fails", "ValueError"),
    ]
    assert sites(recording.calls[2].out) == ["mutated.args[0]"]
    assert recording.final == ()


def test_interrupts_pass() -> None:
    class Stopped(nn.Module):
        def forward(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Recorder(HostDigester()).run() as recording:
        Stopped()()
    assert recording.calls[0].error == "KeyboardInterrupt"


def test_two_recordings_at_once_are_refused() -> None:
    with Recorder(HostDigester()).run(), pytest.raises(UsageError), Recorder(HostDigester()).run():
        pass


def test_methods_kept_from_a_run_still_work_after_it() -> None:
    net = Net()
    with Recorder(HostDigester()).run() as recording:
        kept = net.first.forward
        call = net.__call__
    assert torch.equal(kept(X), net.first(X))
    assert torch.equal(call(X), net(X))
    assert recording.calls == []


def test_user_hooks_still_run_and_are_seen() -> None:
    net = Net()
    net.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    net.first.register_forward_hook(lambda module, args, out: out * 3)
    recording = record(net, X)
    assert dict(call_of(recording, "first").args)["args[0]"] == digest(X)
    assert dict(call_of(recording, "first.linear").args)["args[0]"] == digest(X + 1)
    with torch.no_grad():
        assert dict(call_of(recording, "first").out)["out"] == digest(net.first.linear(X + 1) * 2 * 3)


def test_gradients_flow_as_without() -> None:
    net = Net()
    net(X).sum().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    with recorder_of(net).run():
        net(X).sum().backward()
    assert len(expected) == 4
    assert all(
        torch.equal(a, p.grad) for a, p in zip(expected, net.parameters(), strict=True) if p.grad is not None
    )


def test_current_call() -> None:
    seen: list[Any] = []
    net = Net()
    recorder = recorder_of(net, exclude=["second"])
    net.first.linear.register_forward_pre_hook(lambda *_: seen.append(recorder.current_call()))
    net.second.register_forward_pre_hook(lambda *_: seen.append(recorder.current_call()))
    with recorder.run():
        net(X)
        net(X)
    assert seen == [("first.linear", 0), ("", 0), ("first.linear", 1), ("", 1)]
    assert recorder.current_call() is None


def test_calls_of_threads_that_were_there_before_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, done = threading.Event(), threading.Event()
    net = Net()

    def serve() -> None:
        begin.wait()
        net(X)
        done.set()

    thread = threading.Thread(target=serve)
    thread.start()
    monkeypatch.setattr(
        "detaudit.hooks.run._FOREIGN", None
    )  # as in a process that records for the first time
    recorder = recorder_of(net)
    with recorder.run() as recording:
        begin.set()
        done.wait()
    thread.join()
    assert recording.calls == []


def test_shared_modules_have_their_first_name_and_aliases() -> None:
    net = Net()
    net.third = net.first
    recorder = recorder_of(net)
    assert recorder.modules()[1] == ModuleInfo("first", "Block", ("third",))
    assert recorder.module_at("third") is net.first
    assert recorder.module_at("nowhere") is None


def test_parts_called_before_the_whole_have_their_paths_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()))
    recorder = Recorder(HostDigester())
    with torch.no_grad(), recorder.run() as recording:
        model[1](torch.ones(2, 4))
        model(torch.ones(2, 4))
    assert paths(recording) == ["1", "1.0", "", "0", "1", "1.0"]
    assert [call.ordinal for call in recording.calls] == [0, 0, 0, 0, 1, 1]
