"""CUDA graphs as the recorder sees them, on a graph that runs on the CPU."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester
from detaudit.core.options import Options
from detaudit.core.recording import Call
from detaudit.execution import Session
from detaudit.hooks import graphs
from detaudit.hooks.graph_template import HOST_TENSOR
from detaudit.hooks.graphs import UNWATCHED, GraphWatcher
from detaudit.hooks.recorder import Recorder, Recording
from detaudit.target import TargetSpec, load
from tests.hooks.cpu_graph import CpuGraph, GraphingDigester, captured
from tests.support import call_of, paths, sites


@pytest.fixture(autouse=True)
def cpu_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuGraph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: CpuGraph.current is not None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


class Block(nn.Module):
    """Adds one to its input in place, then multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        x += 1
        self.seen += x[0]  # type: ignore[operator]
        out: Tensor = x @ self.weight * scale
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Graphed(nn.Module):
    """Runs ``inner`` from a graph, which it captures when it is built or at its first call."""

    def __init__(self, inner: nn.Module, at_once: bool) -> None:
        super().__init__()
        self.inner = inner
        self.x = torch.zeros(2, 4)
        self.out = torch.zeros(2, 4)
        self.graph: CpuGraph | None = None
        if at_once:
            self.capture()

    def capture(self) -> None:
        self.graph = CpuGraph()
        with captured(self.graph):
            self.out = self.inner(self.x)

    def forward(self, x: Tensor) -> Tensor:
        if self.graph is None:
            self.capture()
        assert self.graph is not None
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()


X, Y = torch.arange(8.0).view(2, 4), torch.ones(2, 4)


def recorder_of(model: object, watcher: GraphWatcher | None = None, **options: Any) -> Recorder:
    digester = watcher.digester if watcher is not None and watcher.digester else GraphingDigester()
    recorder = Recorder(digester, graphs=watcher, **options)
    recorder.attach(model)
    return recorder


def record(recorder: Recorder, model: nn.Module, *inputs: Tensor) -> Recording:
    with torch.no_grad(), recorder.run() as recording:
        for x in inputs:
            model(x.clone())
    return recording


def built(at_once: bool) -> tuple[Graphed, Recorder]:
    torch.manual_seed(1)
    watcher = GraphWatcher(GraphingDigester())
    with torch.no_grad(), watcher.building():
        model = Graphed(Net(), at_once)
    forget(model)
    return model, recorder_of(model, watcher)


def forget(model: nn.Module) -> None:
    """Unlike a real capture, that of a ``CpuGraph`` does what it notes."""
    for module in model.modules():
        if isinstance(module, Block):
            module.get_buffer("seen").zero_()


def plain(*inputs: Tensor) -> Recording:
    """The same model without a graph."""
    torch.manual_seed(1)
    inner = Net()
    model = nn.Sequential()
    model.add_module("inner", inner)
    return record(recorder_of(model), model, *inputs)


def names(recording: Recording) -> list[tuple[str, int, int, str]]:
    return [(call.module, call.ordinal, call.parent, call.via) for call in recording.calls]


GRAPHED_TWICE = [
    ("", 0, -1, "call"),
    ("inner", 0, 0, "graph"),
    ("inner.first", 0, 1, "graph"),
    ("inner.second", 0, 1, "graph"),
    ("", 1, -1, "call"),
    ("inner", 1, 4, "graph"),
    ("inner.first", 1, 5, "graph"),
    ("inner.second", 1, 5, "graph"),
]


@pytest.mark.parametrize("at_once", [True, False])
def test_every_replay_is_one_more_ordinal_of_each_call(at_once: bool) -> None:
    model, recorder = built(at_once)
    recording = record(recorder, model, X, Y)
    assert names(recording) == GRAPHED_TWICE
    assert recording.unobserved == (("", "attr.graph", recording.unobserved[0][2]),)
    assert names(record(recorder, model, Y, X)) == GRAPHED_TWICE


def test_a_replay_has_the_digests_of_an_eager_run() -> None:
    model, recorder = built(True)
    eager, graphed = plain(X, Y), record(recorder, model, X, Y)
    assert eager.calls[-1].module == "inner.second"
    for path in ("inner", "inner.first", "inner.second"):
        for ordinal in (0, 1):
            ours, theirs = call_of(graphed, path, ordinal), call_of(eager, path, ordinal)
            assert dict(ours.args)["args[0]"] == dict(theirs.args)["args[0]"]
            assert ours.state == theirs.state
            assert ours.out == theirs.out
    assert call_of(graphed, "inner", 0).out != call_of(graphed, "inner", 1).out
    assert sites(call_of(graphed, "inner.first").out) == ["buffer.seen", "mutated.args[0]", "out"]


def test_a_later_run_and_a_run_without_recording() -> None:
    model, recorder = built(True)
    first = record(recorder, model, X)
    assert not recorder.graphs.notes
    with torch.no_grad(), recorder.graphs.armed():
        model(X.clone())
    (note,) = recorder.graphs.notes
    assert "(1 replays)" in note
    forget(model)
    again = record(recorder, model, X)
    assert [call.out for call in again.calls[1:]] == [call.out for call in first.calls[1:]]


def test_host_scalars_are_constants_and_host_tensors_unobserved() -> None:
    class Indexed(nn.Module):
        def forward(self, x: Tensor, index: Tensor, scale: float) -> Tensor:
            return x * scale + index.sum()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Indexed()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x, torch.zeros(3, dtype=torch.int64), 3.0)
            return out

    model = Graphed(Outer(), False)
    recording = record(recorder_of(model), model, X)
    assert sites(call_of(recording, "inner.inner").args) == ["args[0]", "args[2]", "rng.cpu"]
    assert ("inner.inner", "args[1]", HOST_TENSOR) in recording.unobserved


def test_generator_states_are_those_at_the_replay() -> None:
    model, recorder = built(True)
    with torch.no_grad(), recorder.run() as recording:
        torch.manual_seed(5)
        model(X.clone())
        torch.manual_seed(6)
        model(X.clone())
    outer, inner = [call_of(recording, path, 0) for path in ("", "inner.first")]
    assert dict(outer.args)["rng.cpu"] == dict(inner.args)["rng.cpu"]
    assert dict(inner.args)["rng.cpu"] != dict(call_of(recording, "inner.first", 1).args)["rng.cpu"]


def test_calls_left_out_give_their_children_to_the_call_around_them() -> None:
    watcher = GraphWatcher(GraphingDigester())
    with torch.no_grad(), watcher.building():
        model = Graphed(Net(), True)
    recorder = recorder_of(model, watcher, exclude=["inner", "inner.second"])
    assert names(record(recorder, model, X)) == [("", 0, -1, "call"), ("inner.first", 0, 0, "graph")]


def test_a_graphed_callable_is_one_call() -> None:
    """As ``make_graphed_callables`` does it: the module's own forward replays its graph."""
    net, x, graph = Net(), torch.zeros(2, 4), CpuGraph()
    watcher = GraphWatcher(GraphingDigester())
    with torch.no_grad(), watcher.building(), captured(graph):
        out = net(x)

    def forward(new: Tensor) -> Tensor:
        x.copy_(new)
        graph.replay()
        copied: Tensor = out.clone()
        return copied

    net.__dict__["forward"] = forward
    recorder = recorder_of(net, watcher)
    recording = record(recorder, net, X, Y)
    assert names(recording)[:4] == [
        ("", 0, -1, "call"),
        ("first", 0, 0, "graph"),
        ("second", 0, 0, "graph"),
        ("", 1, -1, "call"),
    ]
    assert call_of(recording, "second").out[-1][1] == call_of(recording, "").out[-1][1]


def test_current_ordinals_count_replays() -> None:
    model, recorder = built(True)
    seen: list[Any] = []
    with torch.no_grad(), recorder.run():
        model(X.clone())
        model.inner.get_submodule("first").register_forward_pre_hook(
            lambda *_: seen.append(recorder.current_call())
        )
        model.inner(X.clone())
    assert seen == [("inner.first", 1)]


def test_a_script_replays_at_its_top_level() -> None:
    net, x, graph = Net(), X.clone(), CpuGraph()
    with torch.no_grad(), Recorder(GraphingDigester()).run() as recording:
        net(x)
        with captured(graph):
            net(x)
        graph.replay()
        graph.replay()
    assert paths(recording) == ["", "first", "second"] * 3
    assert [call.via for call in recording.calls[::3]] == ["call", "graph", "graph"]
    assert sites(recording.final) == ["call[0].out", "call[1].out", "call[2].out"]


def test_only_final_outputs_of_a_script_without_recording() -> None:
    net, x, graph = Net(), X.clone(), CpuGraph()
    with torch.no_grad(), Recorder(GraphingDigester(), exclude=["*"]).run() as recording:
        with captured(graph):
            out = net(x)
        graph.replay()
    assert recording.calls == []
    assert recording.final == (("out", HostDigester().submit(out).value),)


def test_a_graph_nobody_watched_is_said_to_be_unobserved() -> None:
    model = Graphed(Net(), True)
    recorder = recorder_of(model)
    recording = record(recorder, model, X)
    assert paths(recording) == [""]
    assert ("", "", UNWATCHED) in recording.unobserved


def test_digests_on_the_host_cannot_be_captured() -> None:
    model = Graphed(Net(), False)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    recording = record(recorder, model, X)
    assert paths(recording) == [""]
    assert ("", "", graphs.ON_HOST) in recording.unobserved


def test_slots_without_room_are_said_to_be_unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = built(True)

    def full(_: object) -> None:
        raise MemoryError("the ring is full")

    monkeypatch.setattr("tests.hooks.cpu_graph.CpuSlots.replayed", full)
    recording = record(recorder, model, X)
    assert ("", "", "calls in a CUDA graph (MemoryError: the ring is full)") in recording.unobserved


def test_a_digester_that_is_not_ready_does_not_stop_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(GraphingDigester, "prepare_capture", broken)
    model = Graphed(Net(), False)
    recording = record(recorder_of(model), model, X)
    assert ("", "", "calls in a CUDA graph (RuntimeError: no kernel)") in recording.unobserved


def test_a_capture_that_fails_leaves_nothing() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = Graphed(Net(), False)
    bad, graph = Fails(), CpuGraph()
    recorder = recorder_of(model)
    with torch.no_grad(), recorder.run() as recording:
        with pytest.raises(ValueError, match="no"), captured(graph):
            bad(X)
        with captured(CpuGraph()), pytest.raises(RuntimeError, match="in progress"):
            CpuGraph().capture_begin()
        model(X.clone())
    assert names(recording) == GRAPHED_TWICE[:4]


def test_calls_that_are_cut_by_the_capture() -> None:
    """A call that begins before the capture and ends in it, and one that begins in it and ends after it."""
    graph = CpuGraph()

    class Begins(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            graph.capture_begin()
            return y * 2

    class Ends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            graph.capture_end()
            return y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begins, self.middle, self.ends = Begins(), Block(), Ends()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.ends(self.middle(self.begins(x)))
            graph.replay()
            return out

    model = Model()
    recording = record(recorder_of(model), model, X)
    assert names(recording) == [
        ("", 0, -1, "call"),
        ("begins", 0, 0, "call"),
        ("middle", 0, 0, "graph"),
        ("ends", 0, 0, "graph"),
    ]
    assert sites(call_of(recording, "begins").out) == []
    assert any(path == "begins" and site == "out" for path, site, _ in recording.unobserved)
    assert sites(call_of(recording, "").out) == ["out"]
    assert sites(call_of(recording, "middle").out)[-1] == "out"


def test_a_replay_on_another_thread() -> None:
    model, recorder = built(True)

    def work() -> None:
        assert model.graph is not None
        with torch.no_grad():
            model.inner.get_submodule("second")(X.clone())
            model.graph.replay()

    with torch.no_grad(), recorder.run() as recording:
        model(X.clone())
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert sorted(paths(recording)) == sorted(
        ["", *["inner", "inner.first", "inner.second"] * 2, "inner.second"]
    )
    assert {call.parent for call in recording.calls if call.module == "inner"} == {0, -1}


def test_a_graph_and_its_modules_can_go() -> None:
    model, recorder = built(False)
    record(recorder, model, X)
    assert model.graph is not None
    graph, inner = weakref.ref(model.graph), weakref.ref(model.inner)
    recorder.attach(nn.Module())
    del model
    gc.collect()
    assert graph() is None
    assert inner() is None
    assert len(recorder.graphs._graphs) == 0


def test_modules_that_are_gone_are_told() -> None:
    graph = CpuGraph()
    net: Any = Net()
    with torch.no_grad(), Recorder(GraphingDigester()).run() as recording:
        with captured(graph):
            net(X.clone())
        net.second = None
        gc.collect()
        graph.replay()
    assert paths(recording) == ["", "first"]
    assert ("", "", "1 calls in a CUDA graph are of modules that are gone") in recording.unobserved


def test_a_reset_or_recaptured_graph_has_its_new_calls() -> None:
    model, recorder = built(True)
    assert model.graph is not None
    with torch.no_grad(), recorder.run() as recording:
        model.graph.reset()
        with captured(model.graph):
            model.out = model.inner.get_submodule("first")(model.x)
        model(X.clone())
    assert paths(recording) == ["", "inner.first"]


def test_calls_in_graphs_are_not_captured_as_tensors() -> None:
    model, recorder = built(True)
    with torch.no_grad(), recorder.run(capture={("inner.first", 0), ("", 0)}) as recording:
        model(X.clone())
    reason = recording.captured["inner.first", 0].reason
    assert reason is not None
    assert "CUDA graph" in reason
    assert recording.captured["", 0].reason is None


def test_the_methods_are_put_back() -> None:
    names = ("capture_begin", "capture_end", "replay", "reset")
    before = [vars(CpuGraph)[name] for name in names]
    watcher = GraphWatcher(GraphingDigester())

    def fail() -> None:
        with watcher.building(), watcher.armed():
            assert vars(CpuGraph)["replay"] is not before[2]
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert [vars(CpuGraph)[name] for name in names] == before


def test_nothing_is_wrapped_while_a_model_is_built_but_during_a_capture() -> None:
    watcher = GraphWatcher(GraphingDigester())
    original = Block.forward
    with watcher.building():
        assert Block.forward is original
        with captured(CpuGraph()):
            assert Block.forward is not original
        assert Block.forward is original


def test_via_is_told_apart() -> None:
    model, recorder = built(True)
    calls: list[Call] = record(recorder, model, X).calls
    assert {call.module: call.via for call in calls} == {
        "": "call",
        "inner": "graph",
        "inner.first": "graph",
        "inner.second": "graph",
    }


TARGET = """
import torch
from tests.hooks.test_graphs import Graphed, Net

def build_model():
    torch.manual_seed(1)
    with torch.no_grad():
        model = Graphed(Net(), True)
    for name in ("x", "out"):
        held = getattr(model, name)
        delattr(model, name)
        model.register_buffer(name, held)
    return model

def make_inputs():
    return torch.ones(2, 4)
"""


def test_a_session_watches_from_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GraphingDigester()
    monkeypatch.setattr(graphs, "make_digester", lambda device: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    path = tmp_path / "target.py"
    path.write_text(TARGET)
    with Session(load(TargetSpec(path, "build_model", ())), Options()) as session:
        assert session.digester is made
        runs = [session.execute(recorded=recorded).run for recorded in (True, False, True)]
        assert [call.via for call in runs[0].calls] == ["call", "graph", "graph", "graph"]
        assert [call.out for call in runs[0].calls] == [call.out for call in runs[2].calls]
        assert {run.records["final"] for run in runs} == {runs[0].records["final"]}
        assert any("1 replays" in note for note in session.notes)
    assert vars(CpuGraph)["replay"].__module__ == CpuGraph.__module__
