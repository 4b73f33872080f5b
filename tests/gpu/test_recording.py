"""Recording on a GPU: no waiting, no leak, no race of our own, and the target's races stay to be seen."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, make_digester
from detaudit.hooks.recorder import Recorder
from tests.support import call_of, paths

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

Stream: Any = torch.cuda.Stream
Event: Any = torch.cuda.Event
sleep: Any = torch.cuda._sleep  # takes clock cycles
WIDTH = 256


def small_net() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU()) for _ in range(10)]
    return nn.Sequential(*layers).cuda().eval()


def recorder_of(model: nn.Module) -> Recorder:
    recorder = Recorder(make_digester("cuda"))
    recorder.attach(model)
    return recorder


def test_recording_does_not_wait_for_the_device() -> None:
    """Two ways to see it: torch counts its own synchronisations, and a busy device would hold us up."""
    model, x = small_net(), torch.randn(32, WIDTH, device="cuda")
    recorder = recorder_of(model)
    with torch.no_grad():
        with recorder.run():
            model(x)
        with recorder.run() as recording:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                sleep(1_000_000_000)  # about 0.5 s
                model(x)
                done = Event()
                done.record()
                assert not done.query(), "a call waited for the device"
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(recording.calls) == 41


def test_synchronising_would_be_noticed() -> None:
    """Control of the test above."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_thousand_runs_leave_memory_flat() -> None:
    model, x = small_net(), torch.randn(32, WIDTH, device="cuda")
    recorder = recorder_of(model)

    def run() -> None:
        with torch.no_grad(), recorder.run() as recording:
            model(x)
        assert len(recording.calls) == 41

    def levels() -> tuple[int, int, int]:
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(gc.get_objects())

    for _ in range(20):
        run()
    allocated, reserved, objects = levels()
    for _ in range(1000):
        run()
    now = levels()
    assert now[:2] == (allocated, reserved)
    assert now[2] < objects + 1000


class Sided(nn.Module):
    """Works on a stream of its own, and lets go of its memory before the device has come that far."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    def forward(self, x: Tensor, fill: float) -> Tensor:
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            sleep(200_000)
            part: Tensor = self.scaled(x, fill)
        main.wait_stream(self.stream)
        part.record_stream(main)
        return part + 0

    def scaled(self, x: Tensor, fill: float) -> Tensor:
        scaled: Tensor = self.get_submodule("scale")(x, fill)
        return scaled


class Scale(nn.Module):
    def forward(self, x: Tensor, fill: float) -> Tensor:
        return torch.full_like(x, fill)


@pytest.mark.parametrize("megabytes", [1, 64])
def test_digests_belong_to_the_stream_of_their_module(megabytes: int) -> None:
    """Each tensor is overwritten soon after its module returned: by the allocator's next customer."""
    torch.cuda.empty_cache()
    model = Sided()
    model.add_module("scale", Scale())
    recorder = recorder_of(model)
    rows = megabytes * 1024
    x = torch.zeros(rows, WIDTH, device="cuda")
    with torch.no_grad(), recorder.run() as recording:
        for number in range(40):
            model(x, float(number))
            junk = torch.full((rows, WIDTH), -1.0, device="cuda")  # takes what was freed, on this stream
            with torch.cuda.stream(model.stream):
                junk = torch.full((rows, WIDTH), -2.0, device="cuda")
            del junk
    for number in range(40):
        wanted = digest(torch.full((rows, WIDTH), float(number)))
        assert dict(call_of(recording, "scale", number).out)["out"] == wanted
        assert dict(call_of(recording, "", number).out)["out"] == wanted


def test_compiled_modules_are_recorded_at_their_boundary() -> None:
    inner = small_net()
    compiled: Any = torch.compile(inner)
    x = torch.randn(32, WIDTH, device="cuda")
    try:
        with torch.no_grad():
            wanted = digest(compiled(x))
    except Exception as error:
        pytest.skip(f"torch.compile does not work here: {error}".splitlines()[0])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    recorder = recorder_of(compiled)
    for _ in range(2):
        with torch.no_grad(), recorder.run() as recording:
            compiled(x)
        assert paths(recording) == [""]
        assert dict(recording.calls[0].out)["out"] == wanted
        assert ("0", "", "it runs inside a compiled module") in recording.unobserved
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


RACE = """
import torch
from torch import nn

class Clears(nn.Module):
    '''Another stream clears the sums while they are added up.'''
    def __init__(self):
        super().__init__()
        self.side = torch.cuda.Stream()

    def forward(self, x):
        sums = x.clone()
        if {ordered}:
            self.side.wait_stream(torch.cuda.current_stream())
        else:
            torch.cuda._sleep(2_000_000)  # so that both streams have all their work before they begin it
        with torch.cuda.stream(self.side):
            torch.cuda._sleep(2_000_000)
            for _ in range(40):
                sums.zero_()
        if {ordered}:
            torch.cuda.current_stream().wait_stream(self.side)
        for _ in range(40):
            sums += 1
        torch.cuda.current_stream().wait_stream(self.side)
        return sums

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.clears, self.after = nn.Linear(64, 64), Clears(), nn.Linear(64, 64)

    def forward(self, x):
        return self.after(self.clears(self.before(x)))

def build_model():
    torch.manual_seed(0)
    return Model().cuda()

def make_inputs():
    return torch.ones(512, 64, device="cuda")
"""

GRAPH = """
import torch
from torch import nn

class Combine(nn.Module):
    def forward(self, rows, tokens):
        if {racing}:
            return torch.zeros(64, rows.shape[1], device="cuda").index_add_(0, tokens, rows)
        return rows.view(-1, 64, rows.shape[1]).sum(0)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.combine = nn.Linear(256, 256), Combine()

    def forward(self, x):
        return self.combine(self.up(x), torch.arange(len(x), device="cuda") % 64)

class Graphed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner().cuda()
        self.register_buffer("x", torch.randn(8192, 256, device="cuda"), persistent=False)
        stream = torch.cuda.Stream()
        with torch.no_grad():
            with torch.cuda.stream(stream):
                self.inner(self.x)
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                out = self.inner(self.x)
        self.register_buffer("out", out, persistent=False)

    def forward(self, x):
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()

def build_model():
    torch.manual_seed(0)
    return Graphed()

def make_inputs():
    torch.manual_seed(1)
    return torch.randn(8192, 256).cuda()
"""


def audited(tmp_path: Path, source: str, *options: str) -> tuple[int, dict[str, Any]]:
    target, report = tmp_path / "target.py", tmp_path / "report.json"
    target.write_text(source)
    command = [sys.executable, "-m", "detaudit", "run", str(target), "--json", str(report), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert report.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    return done.returncode, found


def outputs_of(source: str, runs: int) -> int:
    """How many different outputs the target gives without any observation."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "target", "exec"), namespace)
    with torch.no_grad():
        model = namespace["build_model"]()
        return len({digest(model(namespace["make_inputs"]())) for _ in range(runs)})


def test_a_race_on_a_side_stream_is_not_hidden_by_recording(tmp_path: Path) -> None:
    source = RACE.format(ordered=False)
    if outputs_of(source, 20) == 1:
        pytest.skip("void control: the race did not vary without recording")
    status, report = audited(tmp_path, source, "--runs", "12", "--no-history")
    assert (status, report["verdict"]) == (1, "nondeterministic")
    assert [origin["module"] for origin in report["origins"]] == ["clears"]


def test_with_the_event_it_is_stable(tmp_path: Path) -> None:
    status, report = audited(tmp_path, RACE.format(ordered=True), "--runs", "12")
    assert (status, report["verdict"]) == (0, "deterministic")
    assert report["observer"]["runs_off"] > 0
    assert report["observer"]["agree"]
    assert not [finding for finding in report["findings"] if finding["kind"] == "observer-effect"]


def test_the_origin_inside_a_graph(tmp_path: Path) -> None:
    source = GRAPH.format(racing=True)
    if outputs_of(source, 20) == 1:
        pytest.skip("void control: index_add_ in fp32 did not vary in a graph on this GPU")
    status, report = audited(tmp_path, source, "--runs", "8", "--no-history")
    assert (status, report["verdict"]) == (1, "nondeterministic")
    assert [origin["module"] for origin in report["origins"]] == ["inner.combine"]
    assert any("keep computing digests" in note for note in report["coverage"]["notes"])


def test_a_stable_graph(tmp_path: Path) -> None:
    status, report = audited(tmp_path, GRAPH.format(racing=False), "--runs", "6")
    assert (status, report["verdict"]) == (0, "deterministic")
