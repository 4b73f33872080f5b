"""Calls kept with their tensors, and outputs held fixed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester, digest
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import call_of

X = torch.arange(8.0).view(2, 4)


class Doubles(nn.Module):
    def forward(self, x: Tensor, *, add: Tensor) -> dict[str, Tensor]:
        x.mul_(2)
        return {"sum": x + add, "x": x}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doubles = Doubles()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.doubles(x, add=x)["sum"]
        x.zero_() if x.is_inference() else None
        out: Tensor = self.linear(x)
        return out


def record(model: nn.Module, **options: Any) -> Recording:
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with torch.no_grad(), recorder.run(**options) as recording:
        model(X.clone())
    return recording


def test_inputs_are_kept_as_they_were_handed_in() -> None:
    recording = record(Net(), capture={("doubles", 1)})
    ((key, kept),) = recording.captured.items()
    call = call_of(recording, *key)
    assert key == ("doubles", 1)
    assert kept.reason is None
    assert kept.args is not None
    assert kept.kwargs is not None
    assert digest(kept.args[0]) == dict(call.args)["args[0]"]
    assert digest(kept.output["sum"]) == dict(call.out)["out.sum"]
    assert "mutated.args[0]" in dict(call.out)


def test_aliasing_and_strides_are_kept() -> None:
    class Views(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            return a, b

    class Hands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.views = Views()

        def forward(self, x: Tensor) -> Any:
            return self.views(x.t(), x[1:])

    (kept,) = record(Hands(), capture={("views", 0)}).captured.values()
    assert kept.args is not None
    a, b = kept.args
    assert a.stride() == (1, 4)
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_the_budget_is_kept_and_said() -> None:
    wanted = {("doubles", 0), ("doubles", 1), ("linear", 0)}
    recording = record(Net(), capture=wanted, capture_bytes=100)
    reasons = {key: kept.reason for key, kept in recording.captured.items()}
    assert set(reasons) == wanted
    assert reasons["doubles", 0] is None
    assert "--capture-bytes" in (reasons["doubles", 1] or "")
    assert recording.captured["doubles", 1].args is None


def test_calls_that_did_not_happen() -> None:
    kept = record(Net(), capture={("doubles", 7), ("nowhere", 0)}).captured
    assert [c.reason for c in kept.values()] == ["it was not called in this run"] * 2


def test_substitutes_replace_what_the_parent_gets() -> None:
    net = Net()
    plain = record(net)
    fixed = {"sum": torch.full((2, 4), 5.0), "x": torch.zeros(2, 4)}
    recording = record(net, substitute={("doubles", 1): fixed})
    assert dict(call_of(recording, "doubles", 0).out) == dict(call_of(plain, "doubles", 0).out)
    assert dict(call_of(recording, "doubles", 1).out)["out.sum"] == digest(fixed["sum"])
    assert dict(call_of(recording, "linear").args)["args[0]"] == digest(fixed["sum"])
    assert recording.final != plain.final


def test_a_substitute_is_used_again_and_again_unchanged() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.child(x)
            return out.add_(1)

    fixed, model = torch.zeros(2, 4), Spoils()
    first, second = (record(model, substitute={("child", 0): fixed}) for _ in range(2))
    assert first.final == second.final
    assert torch.equal(fixed, torch.zeros(2, 4))


def test_what_was_captured_makes_a_substitute() -> None:
    net = Net()
    plain = record(net, capture={("doubles", 0)})
    recording = record(net, substitute={("doubles", 0): plain.captured["doubles", 0].output})
    assert recording.calls == plain.calls


def test_capture_on_worker_threads_is_filed_under_the_final_ordinal() -> None:
    import threading

    class Fans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            threads = [threading.Thread(target=self.child, args=(x + i,)) for i in (1, 0)]
            for thread in threads:
                thread.start()
                thread.join()
            return x

    recording = record(Fans(), capture={("child", 1)})
    (kept,) = recording.captured.values()
    assert kept.args is not None
    assert digest(kept.args[0]) == dict(call_of(recording, "child", 1).args)["args[0]"]
