"""One recorded run: which calls, with what inputs, outputs, state and changes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester, digest, scalar_value
from detaudit.core.errors import UsageError
from detaudit.core.recording import ModuleInfo
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import LateDigester, RefusingDigester, call_of, paths, sites


class Block(nn.Module):
    """Counts its calls, in a buffer and in an attribute."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.steps = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.count += 1
        self.steps += 1
        out: Tensor = self.linear(x) * scale
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x, scale=2.0))
        return out


def recorder_of(model: object, **options: Any) -> Recorder:
    recorder = Recorder(HostDigester(), **options)
    recorder.attach(model)
    return recorder


def record(model: Any, *args: Any, **options: Any) -> Recording:
    with torch.no_grad(), recorder_of(model, **options).run() as recording:
        model(*args)
    return recording


X = torch.arange(8.0).view(2, 4)


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


# The control for in-place changes seen at all: the same module without them.
def test_a_call_that_changes_nothing_has_only_an_output() -> None:
    assert sites(record(nn.ReLU(), X).calls[0].out) == ["out"]


def test_replayed_calls_can_be_emitted() -> None:
    net = Net()
    recorder = recorder_of(net)
    with torch.no_grad(), recorder.run() as recording:
        run = recorder._run
        assert run is not None
        with run.diverted() as template:
            net(X)
        run.emit([frame.replayed(lambda pending: pending) for frame in template])
        run.emit([frame.replayed(lambda pending: pending) for frame in template])
    assert [(c.module, c.ordinal, c.via) for c in recording.calls if c.module in ("", "second")] == [
        ("", 0, "graph"),
        ("second", 0, "graph"),
        ("", 1, "graph"),
        ("second", 1, "graph"),
    ]
    assert recording.calls[0].out == recording.calls[5].out
