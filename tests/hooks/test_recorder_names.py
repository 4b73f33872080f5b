"""Paths of modules: wrappers, scripts without a model, several roots, callables that hold modules."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester
from detaudit.core.recording import ModuleInfo
from detaudit.hooks.names import named_modules
from detaudit.hooks.recorder import Recorder, held_modules
from tests.support import Stack, paths, sites

X = torch.ones(2, 4)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_paths_are_those_of_named_modules() -> None:
    model = Stack()
    assert [path for path, _ in named_modules(model)] == [path for path, _ in model.named_modules()]


def test_without_a_model_the_outermost_module_is_the_root() -> None:
    model = encoder()
    with Recorder(HostDigester()).run() as recording:
        model(X)
        model(X)
    assert [(c.module, c.ordinal) for c in recording.calls] == [
        ("", 0),
        ("0", 0),
        ("1", 0),
        ("", 1),
        ("0", 1),
        ("1", 1),
    ]
    assert sites(recording.final) == ["call[0].out", "call[1].out"]


def test_several_roots_are_numbered_by_class() -> None:
    first, second, third = encoder(), encoder(), nn.ReLU()
    recorder = Recorder(HostDigester())
    seen: list[Any] = []
    first[0].register_forward_pre_hook(lambda *_: seen.append(recorder.current_call()))  # type: ignore[index]
    with recorder.run() as recording:
        first(X)
        third(X)
        second(X)
    assert paths(recording) == [
        "Sequential#0",
        "Sequential#0.0",
        "Sequential#0.1",
        "ReLU#0",
        "Sequential#1",
        "Sequential#1.0",
        "Sequential#1.1",
    ]
    assert sites(recording.final) == ["ReLU#0.out", "Sequential#0.out", "Sequential#1.out"]
    assert seen == [("0", 0)]
    assert recording.renamed["0"] == "Sequential#0.0"


def test_numbers_begin_anew_in_every_run() -> None:
    recorder = Recorder(HostDigester())
    runs = []
    for _ in range(2):
        with recorder.run() as recording:
            encoder()(X)
            nn.ReLU()(X)
        runs.append(paths(recording))
    assert runs[0] == runs[1]


def test_a_submodule_called_alone_keeps_its_path() -> None:
    model = encoder()
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        model[0](X)  # type: ignore[index]
    assert paths(recording) == ["0"]
    assert sites(recording.final) == ["0.out"]


class Wrapper(nn.Module):
    """As torch's own wrappers do it, under the name that theirs use."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(self.name)(x)
        return out


class DataParallel(Wrapper):
    pass


def test_wrapper_prefixes_are_removed_and_wrappers_are_one_call_with_what_they_wrap() -> None:
    model = nn.Sequential(
        Wrapper("_fsdp_wrapped_module", Wrapper("_checkpoint_wrapped_module", nn.Linear(4, 4))),
        DataParallel("module", encoder()),
    )
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        model(X)
    assert [(c.module, c.cls) for c in recording.calls] == [
        ("", "Sequential"),
        ("0", "Linear"),
        ("1", "Sequential"),
        ("1.0", "Linear"),
        ("1.1", "ReLU"),
    ]
    assert [info.path for info in recorder.modules()] == ["", "0", "1", "1.0", "1.1"]


def test_a_child_called_module_is_not_a_wrapper_prefix() -> None:
    model = Wrapper("module", nn.ReLU())
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        model(X)
    assert paths(recording) == ["", "module"]


def test_the_real_data_parallel_is_one_call() -> None:
    model = nn.DataParallel(encoder())
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run() as recording:
        model(X)
    assert paths(recording) == ["", "0", "1"]


class Pipeline:
    """Not a module, but it holds some."""

    def __init__(self) -> None:
        self.text = encoder()
        self.stages = {"unet": encoder()}

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.stages["unet"](self.text(x))
        return out

    def generate(self, x: Tensor) -> Tensor:
        return self(x)


def test_callables_that_hold_modules() -> None:
    pipeline, model = Pipeline(), encoder()
    expected = [("text", pipeline.text), ("stages.unet", pipeline.stages["unet"])]
    assert held_modules(pipeline) == expected
    assert held_modules(pipeline.generate) == expected
    assert held_modules(functools.partial(pipeline.generate, X)) == expected
    assert held_modules(model) == held_modules(model.forward) == [("", model)]
    assert held_modules(lambda x: model(x)) == [("model", model)]
    assert held_modules(torch.relu) == []


def test_a_pipeline_is_recorded_under_its_attributes() -> None:
    pipeline = Pipeline()
    recorder = Recorder(HostDigester())
    recorder.attach(pipeline)
    assert ModuleInfo("text.1", "ReLU") in recorder.modules()
    with recorder.run() as recording:
        pipeline(X)
    assert paths(recording) == ["text", "text.0", "text.1", "stages.unet", "stages.unet.0", "stages.unet.1"]
    assert sites(recording.final) == ["stages.unet.out", "text.out"]


def test_attaching_again_after_a_rebuild() -> None:
    recorder = Recorder(HostDigester())
    for _ in range(2):
        model = encoder()
        recorder.attach(model)
        with recorder.run() as recording:
            model(X)
        assert paths(recording) == ["", "0", "1"]


def test_modules_are_not_kept_alive() -> None:
    import gc
    import weakref

    model = encoder()
    ref = weakref.ref(model)
    recorder = Recorder(HostDigester())
    recorder.attach(model)
    with recorder.run():
        model(X)
    del model
    gc.collect()
    assert ref() is None
    assert recorder.modules() == ()
