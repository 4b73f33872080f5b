"""CUDA graphs on a GPU: every replay is recorded, with the digests that an eager run would have."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, make_digester
from detaudit.core.recording import Call
from detaudit.hooks.graphs import GraphWatcher
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import call_of, paths, sites

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from detaudit.core.device.digester import DeviceDigester

pytestmark = pytest.mark.gpu

Stream: Any = torch.cuda.Stream
sleep: Any = torch.cuda._sleep
mark_step: Any = torch.compiler.cudagraph_mark_step_begin
ROWS, WIDTH = 64, 256


class Block(nn.Module):
    """Changes its input in place, and a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        self.seen.add_(x[0])
        out: Tensor = self.linear(x).relu()
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x.clone()))
        return out


class Graphed(nn.Module):
    """Replays a graph of ``inner``."""

    x: Tensor
    out: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("x", torch.zeros(ROWS, WIDTH, device="cuda"), persistent=False)
        self.graph = torch.cuda.CUDAGraph()
        warm_up(lambda: inner(self.x))
        with torch.cuda.graph(self.graph):
            out = inner(self.x)
        self.register_buffer("out", out, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()


def warm_up(call: Callable[[], object]) -> None:
    stream = Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)


def forget(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.seen.zero_()


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(3)
    return [torch.randn(ROWS, WIDTH, device="cuda", generator=generator) for _ in range(count)]


def watched(build: Callable[[], Any]) -> tuple[Any, Recorder]:
    watcher = GraphWatcher()
    with torch.no_grad(), watcher.building():
        model = build()
    recorder = Recorder(watcher.digester or make_digester("cuda"), graphs=watcher)
    recorder.attach(model)
    return model, recorder


def record(recorder: Recorder, model: nn.Module, tensors: list[Tensor]) -> Recording:
    forget(model)
    with torch.no_grad(), recorder.run() as recording:
        for x in tensors:
            model(x)
    return recording


def expected(inner: nn.Module, tensors: list[Tensor]) -> Recording:
    """The same calls, eager, at paths ``inner...``."""
    outer = nn.Sequential()
    outer.add_module("inner", inner)
    recorder = Recorder(make_digester("cuda"))
    recorder.attach(outer)
    return record(recorder, outer, tensors)


def same(ours: Call, theirs: Call) -> None:
    device = {site: value for site, value in theirs.args if not site.startswith("rng")}
    assert {site: value for site, value in ours.args if not site.startswith("rng")} == device
    assert ours.state == theirs.state
    assert ours.out == theirs.out
    for (_, a), (_, b) in zip(ours.out, theirs.out, strict=True):
        assert a.leaves == b.leaves


def test_every_replay_of_a_graph_captured_while_building() -> None:
    inner = Net().cuda()
    model, recorder = watched(lambda: Graphed(inner))
    tensors = inputs(3)
    eager = expected(inner, tensors)
    for _ in range(2):
        recording = record(recorder, model, tensors)
        replayed = [call for call in recording.calls if call.via == "graph"]
        assert len(replayed) == 3 * 5
        assert sites(call_of(recording, "inner.first").out) == ["buffer.seen", "mutated.args[0]", "out"]
        for call in replayed:
            same(call, call_of(eager, call.module, call.ordinal))
        assert {reason for _, site, reason in recording.unobserved if not site.startswith("attr.")} == set()


def test_a_graph_captured_in_a_run() -> None:
    inner = Net().cuda()
    (x,) = inputs(1)
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    digester = make_digester("cuda")
    recorder = Recorder(digester)
    recorder.attach(inner)
    with torch.no_grad(), recorder.run() as recording:
        with torch.cuda.graph(graph):
            inner(static)
        graph.replay()
        inner(static)
    assert [call.via for call in recording.calls] == ["graph"] * 5 + ["call"] * 5
    assert recording.calls[2].out == recording.calls[7].out
    with torch.no_grad(), recorder.run() as again:
        graph.replay()
    assert paths(again) == ["", "first", "first.linear", "second", "second.linear"]


@pytest.mark.parametrize("training", [False, True])
def test_make_graphed_callables(training: bool) -> None:
    net: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).cuda().train(training)
    sample = inputs(1)[0].requires_grad_(training)
    watcher = GraphWatcher()
    graphed: Any = torch.cuda.make_graphed_callables
    with watcher.building():
        net = graphed(net, (sample,))
    assert watcher.digester is not None
    recorder = Recorder(watcher.digester, graphs=watcher)
    recorder.attach(net)
    x = inputs(2)[1].requires_grad_(training)
    with recorder.run() as recording:
        out = net(x)
        if training:
            out.sum().backward()
    assert [(call.module, call.via) for call in recording.calls] == [
        ("", "call"),
        ("0", "graph"),
        ("1", "graph"),
    ]
    assert dict(call_of(recording, "0").args)["args[0]"] == digest(x.detach())
    assert dict(call_of(recording, "1").out)["out"] == digest(out.detach())
    if training:
        assert x.grad is not None


def test_compiled_with_cuda_graphs() -> None:
    """Inner modules run inside generated code; the boundary is recorded and nothing breaks."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).cuda()
    tensors = inputs(4)
    compiled: Any = torch.compile(inner, mode="reduce-overhead")
    plain: Any = torch.compile(inner, mode="reduce-overhead")
    try:
        with torch.no_grad():
            wanted = [digest(plain(x)) for x in tensors]
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}".splitlines()[0])
    torch.compiler.reset()
    model, recorder = watched(lambda: compiled)
    for _ in range(3):
        with torch.no_grad(), recorder.run() as recording:
            for x in tensors:
                mark_step()
                model(x)
        assert paths(recording) == [""] * 4
        assert [dict(call.out)["out"] for call in recording.calls] == wanted
        assert ("0", "", "it runs inside a compiled module") in recording.unobserved


def test_what_was_digested_a_moment_ago_is_not_digested_again() -> None:
    digester = DeviceDigester()
    x, y = inputs(2)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        once = [digester.submit(x), digester.submit(x), *digester.submit_all([y, x])]
        x.add_(1)
        later = [digester.submit(x), digester.submit(y)]
        digester.submit(x.view(torch.int32))
    slots = digester.take_capture()
    assert slots is not None
    assert [pending.index for pending in once] == [0, 0, 1, 0]  # type: ignore[attr-defined]
    assert [pending.index for pending in later] == [2, 3]  # type: ignore[attr-defined]
    assert len(slots) == 5
    before = digest(x)
    graph.replay()
    values = slots.replayed()
    digester.finish()
    assert [values[i].value for i in range(4)] == [before, digest(y), digest(x), digest(y)]


def test_a_change_that_torch_does_not_know_of_is_seen() -> None:
    """A kernel of another library does not bump a tensor's version; its node in the graph tells of it."""
    from detaudit.core.device.driver import copy_on_device

    digester = DeviceDigester()
    x, y = inputs(2)
    before, version = digest(x), x._version
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first = digester.submit(x)
        copy_on_device(x.data_ptr(), y.data_ptr(), y.nbytes, torch.cuda.current_stream().cuda_stream)
        second = digester.submit(x)
    assert x._version == version
    slots = digester.take_capture()
    assert slots is not None
    graph.replay()
    values = slots.replayed()
    digester.finish()
    assert [values[pending.index].value for pending in (first, second)] == [before, digest(y)]  # type: ignore[attr-defined]


def test_replays_on_several_streams_and_threads() -> None:
    """Nothing orders the streams but the replays themselves: slots must be read before they are rewritten."""
    digester = DeviceDigester()
    counter = torch.zeros(ROWS * 64, WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        counter.add_(1)
        pending: Any = digester.submit(counter)
    slots = digester.take_capture()
    assert slots is not None
    streams, found = [Stream() for _ in range(3)], []

    def replay(number: int) -> None:
        with torch.cuda.stream(streams[number % 3]):
            slots.before_replay()
            graph.replay()
            found.append(slots.replayed()[pending.index])
            sleep(100_000)

    for number in range(30):
        thread = threading.Thread(target=replay, args=(number,))
        thread.start()
        thread.join()
    digester.finish()
    assert [one.value for one in found] == [
        digest(torch.full((ROWS * 64, WIDTH), float(number + 1))) for number in range(30)
    ]


def test_a_thousand_replays_and_many_graphs_leave_memory_flat() -> None:
    model, recorder = watched(lambda: Graphed(Net().cuda()))
    (x,) = inputs(1)
    for _ in range(5):
        record(recorder, model, [x])
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        record(recorder, model, [x])
    gc.collect()
    assert torch.cuda.memory_allocated() == before

    def rebuilt() -> int:
        with torch.no_grad(), recorder.graphs.building():
            graphed = Graphed(Net().cuda())
        recorder.attach(graphed)
        record(recorder, graphed, [x])
        del graphed
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that was ever captured on
        return torch.cuda.memory_allocated()

    levels = [rebuilt() for _ in range(12)]
    assert max(levels[6:]) <= max(levels[:6])


def test_a_capture_sees_nothing_of_the_observation() -> None:
    """Under the strictest capture mode, and from memory of the graph's own pool."""
    inner = Net().cuda()
    recorder = Recorder(make_digester("cuda"))
    recorder.attach(inner)
    (x,) = inputs(1)
    with torch.no_grad():
        warm_up(lambda: inner(x))
        plain, watched_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(plain, capture_error_mode="global"):
            first = inner(x)
        with recorder.run(), torch.cuda.graph(watched_graph, capture_error_mode="global"):
            second = inner(x)
        forget(inner)
        plain.replay()
        state = inner.first.seen.clone()
        forget(inner)
        watched_graph.replay()
    assert digest(first) == digest(second)
    assert digest(state) == digest(inner.first.seen)


def test_dropout_in_a_graph() -> None:
    """Generator states are not read during a capture; each replay's are those when it begins."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).cuda().train()
    model, recorder = watched(lambda: Graphed(net))
    (x,) = inputs(1)
    torch.cuda.manual_seed(1)
    recording = record(recorder, model, [x, x])
    states = [dict(call.args)["rng.cuda:0"] for call in recording.calls if call.module == "inner.1"]
    outs = [dict(call.out)["out"] for call in recording.calls if call.module == "inner.1"]
    assert states[0] != states[1]
    assert outs[0] != outs[1]
    torch.cuda.manual_seed(1)
    again = record(recorder, model, [x, x])
    assert [dict(call.out)["out"] for call in again.calls if call.module == "inner.1"] == outs
