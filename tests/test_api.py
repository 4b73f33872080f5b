"""``detaudit.audit``: modules, functions and files, from a program of one's own."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import detaudit
from detaudit.api import arguments
from detaudit.core.errors import TargetInvalid, TargetRaised, TraceNotWritten, UsageError
from tests.cli.programs import python
from tests.support import HIDDEN, TOKENS, Stack, combine_racing


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(8 * TOKENS, HIDDEN, generator=generator),
        torch.randperm(8 * TOKENS, generator=generator) % TOKENS,
    )


def racing(contributions: Tensor, tokens: Tensor) -> Tensor:
    return combine_racing(contributions, tokens, TOKENS)


def test_importing_detaudit_imports_nothing_heavy() -> None:
    code = (
        "import sys, detaudit; from detaudit import Report; assert 'torch' not in sys.modules\n"
        "import detaudit.auditing; assert callable(detaudit.audit); assert 'torch' in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_the_public_names() -> None:
    for name in detaudit.__all__:
        assert getattr(detaudit, name) is not None
        assert name in dir(detaudit)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        detaudit.nothing  # noqa: B018


@pytest.mark.usefixtures("racy")
def test_a_module_and_its_stable_twin(tmp_path: Path) -> None:
    x = torch.randn(TOKENS, HIDDEN)
    report = detaudit.audit(Stack().eval(), x, runs=4, trace=tmp_path / "t.detaudit")
    assert isinstance(report, detaudit.Report)
    assert report.verdict == "nondeterministic"
    assert [(origin.module, origin.cls) for origin in report.origins] == [("layers.0.mlp.experts", "Experts")]
    assert report.target == "Stack"
    assert (tmp_path / "t.detaudit").exists()
    assert list((tmp_path / "t.detaudit.d").glob("operator-*/case.json"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.verdict = "deterministic"  # type: ignore[misc]
    stable = detaudit.audit(Stack(racing=()).eval(), (x,), runs=4)
    assert (stable.verdict, stable.origins, stable.rate.comparisons) == ("deterministic", (), 3)


@pytest.mark.usefixtures("racy")
def test_a_function_is_itself_a_module_and_so_are_those_it_refers_to() -> None:
    report = detaudit.audit(racing, rows(), runs=4)
    assert [(o.module, o.cls, o.operator) for o in report.origins] == [
        ("", "racing", "aten.index_put_.default")
    ]
    model = Stack().eval()

    def generate(x: Tensor, *, scale: float) -> Tensor:
        out: Tensor = model(x) * scale
        return out

    inputs = arguments(torch.randn(TOKENS, HIDDEN), scale=2.0)
    report = detaudit.audit(generate, inputs, runs=4, conditions=["in-process"])
    assert [origin.module for origin in report.origins] == ["model.layers.0.mlp.experts"]
    assert [condition.name for condition in report.conditions][:1] == ["in-process"]
    assert "hooks-off" not in {condition.name for condition in report.conditions}


class Combining(nn.Module):
    """Races in methods of its own, around a module that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(racing=())

    def forward(self, contributions: Tensor, tokens: Tensor) -> Tensor:
        return racing(contributions, tokens)

    def combine(self, contributions: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.stack(self(contributions, tokens))
        return out

    def generate(self, contributions: Tensor, tokens: Tensor) -> Tensor:
        return racing(self.stack(contributions), tokens)


class Pipeline:
    """Not a module, but it holds one."""

    def __init__(self) -> None:
        self.stages = {"unet": Combining().eval()}

    def __call__(self, contributions: Tensor, tokens: Tensor) -> Tensor:
        return racing(self.stages["unet"].stack(contributions), tokens)


@pytest.mark.usefixtures("racy")
def test_a_difference_born_in_any_callables_own_code_has_a_place() -> None:
    model, pipeline = Combining().eval(), Pipeline()
    stack = {"stack", "stack.layers.0.mlp.experts"}
    for target, origin, others in (
        (model.generate, ("", "generate"), stack | {"self"}),
        (functools.partial(model.generate), ("", "generate"), stack | {"self"}),
        (model.combine, ("self", "Combining"), stack | {""}),
        (model.forward, ("", "Combining"), stack),
        (model.__call__, ("", "Combining"), stack),
        (functools.partial(racing), ("", "racing"), set()),
        (pipeline, ("", "Pipeline"), {"stages.unet", "stages.unet.stack"}),
        (pipeline.__call__, ("", "__call__"), {"stages.unet", "stages.unet.stack"}),
    ):
        report = detaudit.audit(target, rows(), runs=4)
        found = [(o.module, o.cls, o.operator) for o in report.origins]
        assert found == [(*origin, "aten.index_put_.default")]
        assert others <= {module["path"] for module in report.coverage["modules"]}


def test_generators_of_a_methods_owner_are_put_back() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(0)

        def sample(self) -> Tensor:
            return torch.rand(3, generator=self.generator)

    report = detaudit.audit(Sampler().sample, runs=3)
    assert report.verdict == "deterministic"
    assert any(name.endswith("__self__.generator") for name in report.restored["generators"])


def test_inputs_are_the_same_in_every_run_and_may_be_made_afresh() -> None:
    made: list[int] = []

    def inputs() -> dict[str, Tensor]:
        made.append(1)
        return {"x": torch.ones(3)}

    def grow(x: Tensor) -> Tensor:
        return x.add_(1)

    report = detaudit.audit(grow, inputs, runs=3, conditions=["in-process"], confirm=False)
    assert report.verdict == "deterministic"
    assert len(made) == 3
    assert detaudit.audit(grow, torch.zeros(2), runs=2).verdict == "deterministic"


def test_random_numbers_are_put_back_also_for_the_caller() -> None:
    state = torch.get_rng_state()
    assert detaudit.audit(lambda: torch.rand(3), runs=3).verdict == "deterministic"
    assert torch.equal(state, torch.get_rng_state())


def test_gradients_only_where_asked_for() -> None:
    linear = nn.Linear(2, 2)

    def modes(x: Tensor) -> int:
        return int(linear(x).requires_grad)

    x = torch.ones(1, 2)
    assert detaudit.audit(modes, x, runs=2).verdict == "deterministic"
    seen: list[bool] = []

    def note(x: Tensor) -> Tensor:
        out: Tensor = linear(x)
        seen.append(out.requires_grad)
        return out

    detaudit.audit(note, x, runs=2, conditions=(), confirm=False)
    detaudit.audit(note, x, runs=2, conditions=(), confirm=False, grad=True)
    assert seen == [False, False, True, True]


def test_nothing_returned_is_nothing_shown() -> None:
    report = detaudit.audit(lambda: None, runs=3)
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    assert "nothing was observed" in report.coverage["reason"]
    once = detaudit.audit(lambda: torch.ones(1), runs=1)
    assert once.verdict == "inconclusive"


def test_a_file_target(tmp_path: Path) -> None:
    file = tmp_path / "api_target.py"
    file.write_text(
        "import torch\n"
        "def build_model(): return torch.nn.Linear(2, 2)\n"
        "def make_inputs(): return torch.ones(1, 2)\n"
    )
    report = detaudit.audit(file, runs=2)
    assert (report.verdict, report.target) == ("deterministic", "api_target.py")
    with pytest.raises(UsageError, match="makes its inputs itself"):
        detaudit.audit(str(file), torch.ones(1, 2))


def test_what_cannot_be_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no condition 'overnight'"):
        detaudit.audit(racing, rows(), conditions=["overnight"])
    with pytest.raises(UsageError, match="audit a target file for 'history'"):
        detaudit.audit(racing, rows(), conditions="history")
    with pytest.raises(UsageError, match="cannot audit a int"):
        detaudit.audit(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="runs is 0"):
        detaudit.audit(racing, rows(), runs=0)
    for wrong in (2.5, "3", True, None):
        for name in ("runs", "kernel_runs", "capture_bytes"):
            with pytest.raises(UsageError, match=f"^{name} is {wrong!r}; give a whole number, at least"):
                detaudit.audit(racing, rows(), **{name: wrong})  # type: ignore[arg-type]
    for name, value, wanted in (
        ("only", 3, "give strings"),
        ("exclude", [None], "give strings"),
        ("conditions", 3, "give strings"),
        ("confirm", "no", "give True or False"),
        ("grad", 1, "give True or False"),
        ("progress", "bar", "give an object with the methods begin, advance, describe"),
        ("trace", 3, "give a path"),
    ):
        with pytest.raises(UsageError, match=f"^{name} is {re.escape(repr(value))}; {wanted}"):
            detaudit.audit(racing, rows(), **{name: value})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"--only 'layers\.\*' matches no module"):
        detaudit.audit(nn.Linear(2, 2), torch.ones(1, 2), only="layers.*")
    with pytest.raises(TargetInvalid, match="inputs are a list"):
        detaudit.audit(racing, [1])
    (tmp_path / "there.detaudit").touch()
    with pytest.raises(TraceNotWritten, match="exists already"):
        detaudit.audit(racing, rows(), trace=tmp_path / "there.detaudit")


def test_a_training_step_on_a_model_outside_cannot_be_repeated() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    with pytest.raises(TargetInvalid, match="step changes parameters"):
        detaudit.audit(step, torch.ones(1, 2), runs=3, grad=True)

    def fresh(x: Tensor) -> Tensor:
        own = nn.Linear(2, 2)
        loss: Tensor = own(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert detaudit.audit(fresh, torch.ones(1, 2), runs=3, grad=True).verdict == "deterministic"


def test_what_the_function_raises_is_told_with_its_frames() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError("no such expert")

    with pytest.raises(TargetRaised, match=r"ValueError: no such expert") as raised:
        detaudit.audit(fails, torch.ones(1))
    assert isinstance(raised.value.__cause__, ValueError)
    assert "in fails" in raised.value.frames
