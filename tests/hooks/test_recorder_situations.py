"""What targets really do. Each has a control that differs, so that equal records mean something."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester, digest
from detaudit.core.recording import Call
from detaudit.hooks.recorder import Recorder, Recording
from tests.support import HIDDEN, TOKENS, Stack, call_of, paths, sites

X = torch.arange(8.0).view(2, 4)


def record(model: Any, *args: Any, recorder: Recorder | None = None, **kwargs: Any) -> Recording:
    if recorder is None:
        recorder = Recorder(HostDigester())
        recorder.attach(model)
    with torch.no_grad(), recorder.run() as recording:
        model(*args, **kwargs)
    return recording


def sources(a: Recording, b: Recording) -> list[str]:
    """Modules whose inputs and state agree in two runs and whose outputs do not, innermost included."""
    assert [(c.module, c.ordinal) for c in a.calls] == [(c.module, c.ordinal) for c in b.calls]
    return [
        c.module
        for c, d in zip(a.calls, b.calls, strict=True)
        if (c.args, c.state) == (d.args, d.state) and c.out != d.out
    ]


def test_a_race_shows_at_its_module_and_nowhere_else(racy: None) -> None:
    torch.manual_seed(0)
    model, x = Stack(racing=(1,), layers=3), torch.randn(TOKENS, HIDDEN)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    first = record(model, x, recorder=recorder)
    found = {name for _ in range(20) for name in sources(first, record(model, x, recorder=recorder))}
    assert found == {"", "layers.1", "layers.1.mlp", "layers.1.mlp.experts"}


def test_the_stable_twin_shows_nothing(racy: None) -> None:
    torch.manual_seed(0)
    model, x = Stack(racing=(), layers=3), torch.randn(TOKENS, HIDDEN)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    first = record(model, x, recorder=recorder)
    assert all(record(model, x, recorder=recorder).calls == first.calls for _ in range(10))


class Twice(nn.Module):
    """One module under two names, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(self.b(x)))
        return out


def test_shared_modules_and_repeated_calls() -> None:
    recording = record(Twice(), X)
    assert [(c.module, c.ordinal) for c in recording.calls] == [("", 0), ("a", 0), ("a", 1), ("a", 2)]
    first, second = call_of(recording, "a", 0), call_of(recording, "a", 1)
    assert dict(second.args)["args[0]"] == dict(first.out)["out"]


class KeepsView(nn.Module):
    """Returns a view of its buffer, which another module changes later."""

    held: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.held.copy_(x)
        return self.held[:, :2]


class Overwrites(nn.Module):
    def forward(self, view: Tensor) -> Tensor:
        return view.fill_(-1)


def test_views_changed_later() -> None:
    recording = record(nn.Sequential(KeepsView(), Overwrites()), X)
    assert dict(call_of(recording, "0").out)["out"] == digest(X[:, :2])
    assert dict(call_of(recording, "1").args)["args[0]"] == digest(X[:, :2])
    assert dict(call_of(recording, "1").out)["mutated.args[0]"] == digest(torch.full((2, 2), -1.0))


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        names = ["a", "b"] if self.turn == 0 else ["b", "a"]
        return {name: x + ord(name) for name in names}


def test_dict_outputs_in_another_order() -> None:
    model = Ordered()
    first = record(model, X)
    model.turn = 1
    second = record(model, X)
    assert list(model(X)) == ["b", "a"], "the control: the order did change"
    assert first.calls[0].out == second.calls[0].out


def test_kwargs_changed_in_place() -> None:
    class Fills(nn.Module):
        def forward(self, x: Tensor, *, out: Tensor, info: dict[str, int]) -> Tensor:
            info["calls"] = info.get("calls", 0) + 1
            return out.copy_(x)

    recording = record(Fills(), X, out=torch.zeros(2, 4), info={})
    assert sites(recording.calls[0].out) == ["mutated.kwargs.info.calls", "mutated.kwargs.out", "out"]


class Falls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad = Falls()
        self.good = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        try:
            out: Tensor = self.bad(x)
        except RuntimeError:
            out = self.good(x)
        return out


def test_exceptions_that_a_parent_catches() -> None:
    recording = record(nn.Sequential(Catches(), nn.ReLU()), X)
    assert [(c.module, c.parent, c.error) for c in recording.calls] == [
        ("", -1, None),
        ("0", 0, None),
        ("0.bad", 1, "RuntimeError"),
        ("0.bad.inner", 2, "RuntimeError"),
        ("0.good", 1, None),
        ("1", 0, None),
    ]


class Copies(nn.Module):
    """Runs a deep copy of its child, every time a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        twin = copy.deepcopy(self.child)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        out: Tensor = self.child(x) + twin(x)
        return out


def test_a_target_that_deep_copies() -> None:
    torch.manual_seed(0)
    model = Copies()
    with torch.no_grad():
        expected = model(X)
    recordings = [record(model, X) for _ in range(3)]
    assert paths(recordings[0]) == [
        "",
        "child",
        "child.0",
        "child.1",
        "Sequential#0",
        "Sequential#0.0",
        "Sequential#0.1",
    ]
    assert recordings[0].calls == recordings[1].calls == recordings[2].calls
    assert dict(recordings[0].final)["out"] == digest(expected), "the copies ran their own weights"


def test_a_copy_of_the_whole_model_has_the_models_names() -> None:
    model = Copies()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    original = record(model, X, recorder=recorder)
    for _ in range(2):
        assert record(copy.deepcopy(model), X, recorder=recorder).calls == original.calls


class DynamicCache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Grows(nn.Module):
    """A cache handed in, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Any = None

    def forward(self, x: Tensor, past: DynamicCache) -> Tensor:
        past.keys.append(x.clone())
        self.own = x.clone() if self.own is None else torch.cat([self.own, x])
        out: Tensor = self.own.sum(0) + torch.cat(past.keys).sum(0)
        return out


def test_caches_that_grow() -> None:
    model, past = Grows(), DynamicCache()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with torch.no_grad(), recorder.run() as recording:
        for _ in range(3):
            model(X, past=past)
    outs = [sites(call.out) for call in recording.calls]
    assert outs == [
        ["attr.own", "mutated.kwargs.past.keys[0]", "out"],
        ["attr.own", "mutated.kwargs.past.keys[1]", "out"],
        ["attr.own", "mutated.kwargs.past.keys[2]", "out"],
    ]
    assert sites(recording.calls[2].args)[:2] == ["args[0]", "kwargs.past.keys[0]"]
    assert dict(recording.calls[1].state)["attr.own"] == digest(X)


class Drops(nn.Module):
    """Dropout from torch's default generator, or from a private one."""

    def __init__(self, private: bool) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3) if private else None

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)


@pytest.mark.parametrize("private", [False, True])
def test_dropout_is_no_source_for_the_generator_is_an_input(private: bool) -> None:
    model = nn.Sequential(Drops(private))
    a, b = record(model, X), record(model, X)
    differing = [c.module for c, d in zip(a.calls, b.calls, strict=True) if c.out != d.out]
    assert "0" in differing, "the control: the outputs do differ"
    assert "0" not in sources(a, b)


def test_a_private_generator_put_back_gives_equal_calls() -> None:
    drops = Drops(private=True)
    model = nn.Sequential(drops)
    a = record(model, X)
    assert drops.generator is not None
    drops.generator.manual_seed(3)
    torch.manual_seed(0)
    b = record(model, X)
    assert _without_rng(call_of(a, "0")) == _without_rng(call_of(b, "0"))
    assert call_of(a, "0").out == call_of(b, "0").out


def _without_rng(call: Call) -> Any:
    return [entry for entry in call.args if not entry[0].startswith("rng.")], call.state


def test_a_cache_in_a_module_is_an_input_not_a_race() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x + self.steps

    model = nn.Sequential(Counts())
    a, b = record(model, X), record(model, X)
    assert call_of(a, "0").out != call_of(b, "0").out
    assert call_of(a, "0").state != call_of(b, "0").state
    assert sources(a, b) == [""], "only the container, whose own state does not hold its child's"


def test_modules_made_and_classes_defined_while_it_runs() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            class Defined(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = nn.ReLU()

                def forward(self, x: Tensor) -> Tensor:
                    out: Tensor = self.inner.forward(x)
                    return out

            self.made = Defined()
            out: Tensor = self.made(x) + nn.Sigmoid()(x)
            return out

    recording = record(Late(), X)
    assert [(c.module, c.cls, c.via) for c in recording.calls] == [
        ("", "Late", "call"),
        ("made", "Defined", "call"),
        ("made.inner", "ReLU", "forward"),
        ("Sigmoid#0", "Sigmoid", "call"),
    ]


def test_a_model_output_and_nested_results() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"logits": x, "hidden": (x + 1, [x + 2])}, None

    call = record(Nested(), X).calls[0]
    assert sites(call.out) == ["out[0].hidden[0]", "out[0].hidden[1][0]", "out[0].logits", "out[1]"]
