"""Calls made on several threads: one stack for each, and a sequence that scheduling does not change."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import paths

X = torch.ones(2, 4)


class Slow(nn.Module):
    """Takes its time, so that threads overlap in ever other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(random.random() * 0.004)
        out: Tensor = self.inner(x)
        time.sleep(random.random() * 0.004)
        return out


class Fans(nn.Module):
    """``before``, then branches and ``shared`` on threads, then ``after``."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ReLU()
        self.branches = nn.ModuleList(Slow() for _ in range(3))
        self.shared = Slow()
        self.after = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        jobs: list[Callable[[], Any]] = [functools.partial(branch, x) for branch in self.branches]
        jobs += [functools.partial(self.shared, x + i) for i in range(4)]
        random.shuffle(jobs)
        threads = [threading.Thread(target=_without_grad, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        out: Tensor = self.after(x)
        return out


def _without_grad(job: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return job()


def record(recorder: Recorder, model: nn.Module) -> Recording:
    with torch.no_grad(), recorder.run() as recording:
        model(X)
    return recording


def test_scheduling_does_not_change_the_sequence() -> None:
    model = nn.Sequential(Fans())
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    entered: set[tuple[str, ...]] = set()
    order: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, a, name=name: order.append(name))
    recordings = []
    for _ in range(8):
        order.clear()
        recordings.append(record(recorder, model))
        entered.add(tuple(order))
    assert len(entered) > 1, "the control: the calls did begin in different orders"
    assert all(recording.calls == recordings[0].calls for recording in recordings)
    assert [(c.module, c.ordinal) for c in recordings[0].calls] == [
        ("", 0),
        ("0", 0),
        ("0.before", 0),
        *((f"0.branches.{i}{child}", 0) for i in range(3) for child in ("", ".inner")),
        *((f"0.shared{child}", i) for i in range(4) for child in ("", ".inner")),
        ("0.after", 0),
    ]


def test_parents_are_right_on_every_thread() -> None:
    model = Fans()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    recording = record(recorder, model)
    for call in recording.calls[1:]:
        parent = recording.calls[call.parent].module
        assert parent == (call.module.removesuffix(".inner") if call.module.endswith(".inner") else "")


def test_unattached_modules_are_numbered_the_same_way_each_time() -> None:
    def run() -> list[tuple[str, Any]]:
        models = [nn.Sequential(nn.Linear(4, 4)) for _ in range(4)]
        for i, model in enumerate(models):
            for parameter in model.parameters():
                nn.init.constant_(parameter, i)
        random.shuffle(models)
        with Recorder(HostDigester()).run() as recording, ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda model: _without_grad(lambda: model(X)), models))
        return [(call.module, call.out) for call in recording.calls]

    first = run()
    assert [name for name, _ in first][:2] == ["Sequential#0", "Sequential#0.0"]
    assert all(run() == first for _ in range(5))


def test_a_pool_that_outlives_a_run_is_recorded_in_the_next_one_too() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.ReLU()
            self.pool: Any = ThreadPoolExecutor(1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.pool.submit(self.child, x).result()
            return out

    model = Pooled()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    assert paths(record(recorder, model)) == paths(record(recorder, model)) == ["", "child"]
    model.pool.shutdown()


def test_exceptions_on_a_thread_leave_its_stack_balanced() -> None:
    bad, good = nn.Linear(3, 3), nn.ReLU()

    def work() -> None:
        try:
            bad(X)
        except RuntimeError:
            good(X)

    model = nn.ModuleDict({"bad": bad, "good": good})
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [(c.module, c.parent, c.error) for c in recording.calls] == [
        ("bad", -1, "RuntimeError"),
        ("good", -1, None),
    ]


def test_replicas_have_the_names_of_their_originals() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    recorder = Recorder(HostDigester())
    recorder.attach(model)

    def replica_of(module: Any) -> Any:
        twin = module._replicate_for_data_parallel()
        for name, child in module.named_children():
            twin._modules[name] = replica_of(child)
        for name, parameter in module._parameters.items():
            setattr(twin, name, parameter)
        return twin

    replicas = [replica_of(model) for _ in range(3)]
    with recorder.run() as recording, ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda pair: _without_grad(lambda: pair[1](X + pair[0])), enumerate(replicas)))
    assert {c.module for c in recording.calls} == {"", "0", "1"}
    assert sorted(c.ordinal for c in recording.calls if c.module == "0") == [0, 1, 2]


def test_a_thread_still_running_when_the_run_ends_breaks_nothing() -> None:
    go, entered = threading.Event(), threading.Event()
    results: list[Tensor] = []

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            go.wait()
            return x + 1

    thread = threading.Thread(target=lambda: results.append(Waits()(X)))
    with Recorder(HostDigester()).run() as recording:
        thread.start()
        entered.wait()
    go.set()
    thread.join()
    assert torch.equal(results[0], X + 1)
    assert [(c.cls, c.out) for c in recording.calls] == [("Waits", ())]
