"""Recording under torch.compile, TorchScript and fx: boundaries are seen, nothing is compiled differently."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from detaudit.core.digest import HostDigester
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import call_of, paths, sites

Compile = Callable[[nn.Module, Any], nn.Module]


class Block(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return torch.relu(self.linear(x))


class Net(nn.Module):
    """Calls one block as a module and one as ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second.forward(self.first(x)) + 1
        return out


class Broken(Net):
    """A graph break between the blocks, and one inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.eager = Eager()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        out: Tensor = self.second(self.eager(x))
        return out


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def wrapped(module: nn.Module, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(module, backend=backend)
    return compiled  # type: ignore[no-any-return]


def in_place(module: nn.Module, backend: Any) -> nn.Module:
    module.compile(backend=backend)
    return module


def by_attribute(module: nn.Module, backend: Any) -> nn.Module:
    module.forward = torch.compile(module.forward, backend=backend)
    return module


WAYS = [wrapped, in_place, by_attribute]


def record(model: nn.Module, x: Tensor, recorder: Recorder | None = None) -> Recording:
    if recorder is None:
        recorder = Recorder(HostDigester())
        recorder.attach(model)
    with recorder.run() as recording:
        model(x)
    return recording


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize(
    ("compile_", "backend", "order", "net"),
    [
        (wrapped, "eager", "off on off on", Net),
        (wrapped, "aot_eager", "on off on", Net),
        (in_place, "eager", "on off on", Net),
        (by_attribute, "eager", "off on off", Net),
        (wrapped, "eager", "on off on", Broken),
        (wrapped, "aot_eager", "off on off", Broken),
        (in_place, "eager", "off on off", Broken),
        (by_attribute, "eager", "on off on", Broken),
    ],
)
def test_recording_adds_no_graph_break_and_no_compilation(
    compile_: Compile, backend: str, order: str, net: type[nn.Module]
) -> None:
    x = torch.randn(2, 4)
    plain = CompileCounterWithBackend(backend)
    model = compile_(net(), plain)
    for _ in order.split():
        model(x)
    breaks_without = breaks()
    assert plain.frame_count >= 1, "the control was not compiled"
    assert (breaks_without > 0) == (net is Broken)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counted = CompileCounterWithBackend(backend)
    model = compile_(net(), counted)
    for state in order.split():
        if state == "on":
            assert record(model, x).calls
        else:
            model(x)
    assert (counted.frame_count, counted.op_count) == (plain.frame_count, plain.op_count)
    assert breaks() == breaks_without


@pytest.mark.parametrize("compile_", WAYS)
def test_the_boundary_is_recorded_and_the_inside_is_listed(compile_: Compile) -> None:
    model = compile_(Net(), "aot_eager")
    for _ in range(2):
        recording = record(model, torch.randn(2, 4))
        assert [(c.module, c.cls) for c in recording.calls] == [("", "Net")]
        assert {
            ("first", "", "it runs inside a compiled module"),
            ("first.linear", "", "it runs inside a compiled module"),
            ("second", "", "it runs inside a compiled module"),
            ("second.linear", "", "it runs inside a compiled module"),
        } <= set(recording.unobserved)


def test_state_inside_a_compiled_module_counts_as_its_own() -> None:
    model = wrapped(Net(), "eager")
    call = call_of(record(model, torch.randn(2, 4)), "")
    assert {"buffer.first.seen", "buffer.second.seen"} <= set(sites(call.state))
    assert {"buffer.first.seen", "buffer.second.seen"} <= set(sites(call.out))


def test_a_compiled_child_has_the_path_of_the_module_in_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), wrapped(Net(), "eager"), nn.ReLU())
    recording = record(model, torch.randn(2, 4))
    assert paths(recording) == ["", "0", "1", "2"]
    assert call_of(recording, "1").cls == "Net"
    inside = {path for path, _, reason in recording.unobserved if "compiled" in reason}
    assert inside == {"1.first", "1.first.linear", "1.second", "1.second.linear"}


def test_modules_that_run_in_eager_mode_after_a_graph_break_are_recorded() -> None:
    model = wrapped(Broken(), "aot_eager")
    for _ in range(2):
        recording = record(model, torch.randn(2, 4))
        assert paths(recording)[0] == ""
        assert "eager.linear" in paths(recording)
        unseen = {path for path, site, reason in recording.unobserved if "compiled" in reason}
        assert unseen == {"first", "first.linear", "second", "second.linear"}


def test_a_model_compiled_while_it_is_recorded_runs_on_afterwards() -> None:
    net, x = Net(), torch.randn(2, 4)
    counter = CompileCounterWithBackend("eager")
    recorder = Recorder(HostDigester())
    with recorder.run() as recording:
        model = wrapped(net, counter)
        inside = model(x)
    assert paths(recording) == [""]
    assert torch.equal(inside, model(x))
    assert counter.frame_count == 1


def test_bits_do_not_change() -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 4)
    model = wrapped(net, "aot_eager")
    expected = model(x)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run():
        assert torch.equal(model(x), expected)


def test_explain_sees_no_more_breaks() -> None:
    x = torch.randn(2, 4)
    plain = torch._dynamo.explain(Broken())(x)
    with Recorder(HostDigester()).run():
        recorded = torch._dynamo.explain(Broken())(x)
    assert (recorded.graph_count, recorded.graph_break_count) == (plain.graph_count, plain.graph_break_count)
    assert plain.graph_break_count > 0


def test_a_fullgraph_model_stays_one() -> None:
    compiled: Any = torch.compile(Net(), backend="eager", fullgraph=True)
    recorder = Recorder(HostDigester())
    with recorder.run() as recording:
        compiled(torch.randn(2, 4))
    assert paths(recording) == [""]


def test_a_compiled_function_around_a_module_is_not_broken() -> None:
    net, counter = Net(), CompileCounterWithBackend("eager")

    def step(x: Tensor) -> Tensor:
        out: Tensor = net(x)
        return out * 2

    compiled = torch.compile(step, backend=counter)
    recorder = Recorder(HostDigester())
    recorder.attach(net)
    compiled(torch.randn(2, 4))
    with recorder.run() as recording:
        compiled(torch.randn(2, 4))
    assert counter.frame_count == 1
    assert recording.calls == []


# TorchScript


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def traced(module: nn.Module, x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        trace: Any = torch.jit.trace
        return trace(module, x, check_trace=False)


class Scriptable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # type: ignore[operator]
        return nn.functional.relu(self.linear(x))


def test_a_script_module_is_recorded_at_its_boundary() -> None:
    model = nn.Sequential(scripted(Scriptable()), nn.ReLU())
    recording = record(model, torch.randn(2, 4))
    assert paths(recording) == ["", "0", "1"]
    assert ("0.linear", "", "it runs inside a TorchScript module") in recording.unobserved
    assert "buffer.seen" in sites(call_of(recording, "0").out)


def test_a_traced_module_is_recorded_at_its_boundary() -> None:
    x = torch.randn(2, 4)
    recording = record(nn.Sequential(traced(Scriptable(), x)), x)
    assert paths(recording) == ["", "0"]


def test_scripting_and_tracing_while_recording_work() -> None:
    net, x = Scriptable(), torch.randn(2, 4)
    with Recorder(HostDigester()).run() as recording:
        net(x)
        a, b = scripted(net), traced(net, x)
        assert torch.equal(a(x), net(x))
        assert torch.equal(b(x), net(x))
        net.forward(x)
    assert [c.via for c in recording.calls if c.cls == "Scriptable" and c.module == "Scriptable#0"] == [
        "call",
        "call",
        "call",
        "forward",
    ]


def test_fx_tracing_while_recording_works() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with Recorder(HostDigester()).run() as recording:
        graph = torch.fx.symbolic_trace(net)
        assert torch.equal(graph(x), net(x))
    assert len([c for c in recording.calls if c.cls == "Linear"]) == 2


def test_export_while_recording_works() -> None:
    net, x = Scriptable().eval(), torch.randn(2, 4)
    with Recorder(HostDigester()).run() as recording:
        program = torch.export.export(net, (x,))
    assert recording.calls == []
    assert torch.equal(program.module()(x), net(x))


def test_the_fast_path_of_the_transformer_layer_stays() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    recording = record(layer, x)
    assert paths(recording) == [""]
    layer.norm1.register_forward_pre_hook(lambda *_: None)
    slow = record(layer, x)
    assert len(slow.calls) == 9, "the control: a per-module hook switches the fast path off"
