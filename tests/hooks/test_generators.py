"""Every generator a run can draw from starts every run in the same state, or is named as one that cannot."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from detaudit.hooks import generators
from detaudit.hooks.generator_sources import find


@pytest.fixture(autouse=True)
def _own_generators_untouched() -> Iterator[None]:
    states = generators.capture()
    yield
    generators.restore(states)


class Noisy(nn.Module):
    """Holds one private generator of each kind, each in another sort of place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner[0].generator = torch.Generator().manual_seed(1)  # type: ignore[assignment]
        self.tools = {"python": random.Random(2), "numpy": [np.random.default_rng(3)]}
        self.old = np.random.RandomState(4)
        hidden = torch.Generator().manual_seed(5)
        self.draw: Callable[[], float] = lambda: torch.rand((), generator=hidden).item()

    def forward(self) -> list[float]:
        python, numpy = self.tools["python"], self.tools["numpy"]
        assert isinstance(python, random.Random)
        assert isinstance(numpy, list)
        generator = self.inner[0].generator
        assert isinstance(generator, torch.Generator)
        private = [torch.rand((), generator=generator).item(), python.random(), numpy[0].random()]
        # An odd number of normal deviates: the legacy generator keeps the second of each pair.
        private += [float(self.old.normal()), self.draw()]
        return [*private, random.random(), float(np.random.normal()), torch.rand(()).item()]


PRIVATE = {
    "model.inner.0.generator": "torch",
    "model.tools.python": "python",
    "model.tools.numpy[0]": "numpy",
    "model.old": "numpy",
    "model.draw.hidden": "torch",
}


def test_every_draw_repeats_after_restore_and_none_does_without() -> None:
    model = Noisy()
    states = generators.capture(model, names=["model"])
    first = model()
    control = model()
    assert all(a != b for a, b in zip(first, control, strict=True))
    assert generators.restore(states) == ()
    assert model() == first


def test_private_generators_are_named_by_the_path_that_leads_to_them() -> None:
    found = {source.name: source.identity[0] for source in find(Noisy(), names=["model"])}
    assert found == PRIVATE


def test_consumed_names_the_generators_that_were_drawn_from() -> None:
    model = Noisy()
    states = generators.capture(model, names=["model"])
    assert states.consumed() == ()
    random.random()
    model.draw()
    assert set(states.consumed()) == {"python", "model.draw.hidden"}


def test_description_is_json_and_says_what_cannot_be_put_back() -> None:
    model = nn.Identity()
    model.entropy = random.SystemRandom()  # type: ignore[assignment]
    states = generators.capture(model, names=["model"])
    described = json.loads(json.dumps(states.describe()))
    assert described["cpu"] == "put back"
    assert described["model.entropy"].startswith("not put back: its state cannot be read")
    assert [name for name, _ in generators.restore(states)] == ["model.entropy"]


def test_a_shared_generator_is_saved_once() -> None:
    shared = torch.Generator()
    model = nn.Sequential(nn.Identity(), nn.Identity())
    model[0].a = shared  # type: ignore[assignment]
    model[1].b = shared  # type: ignore[assignment]
    model.default = torch.default_generator  # type: ignore[assignment]
    names = generators.capture(model, names=["model"]).names
    assert names == ("python", "numpy", "cpu", "model.0.a")


def test_cycles_and_large_attributes_end() -> None:
    model = nn.Identity()
    loop: list[object] = [model, random.Random(1)]
    loop.append(loop)
    model.loop = loop  # type: ignore[assignment]
    model.table = list(range(300_000))  # type: ignore[assignment]
    assert [source.name for source in find(model, names=["m"])] == ["m.loop[1]"]


_ELSEWHERE = torch.Generator()


def _draws_from_a_global() -> torch.Tensor:
    return torch.rand(3, generator=_ELSEWHERE)


def test_survey_finds_a_generator_no_attribute_leads_to() -> None:
    before = generators.capture()
    with generators.survey() as seen:
        first = _draws_from_a_global()
    assert generators.restore(before) == ()
    assert not torch.equal(_draws_from_a_global(), first)  # control: not among those found so far
    states = before.with_survey(seen)
    assert "first used by aten.rand.generator" in states.names[-1]
    assert states.consumed() == (states.names[-1],)
    assert generators.restore(states) == ()
    assert torch.equal(_draws_from_a_global(), first)


def test_survey_counts_draws_and_leaves_known_generators_alone() -> None:
    model = Noisy()
    states = generators.capture(model, names=["model"])
    with generators.survey() as seen:
        model()
        torch.rand(2, generator=torch.default_generator)
    assert states.with_survey(seen).names == states.names
    assert sum(seen.drew.values()) == 4


def test_survey_changes_nothing_and_is_gone_after_an_exception() -> None:
    torch.manual_seed(7)
    plain = [torch.rand(4), nn.functional.dropout(torch.ones(64), 0.5)]
    torch.manual_seed(7)
    with generators.survey():
        watched = [torch.rand(4), nn.functional.dropout(torch.ones(64), 0.5)]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    with pytest.raises(RuntimeError, match="planned"), generators.survey():
        raise RuntimeError("planned")
    assert torch._C._len_torch_dispatch_stack() == 0


def test_survey_reports_draws_on_a_device_nobody_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # No such device is at hand: meta stands for one, so that the operator itself runs.
    monkeypatch.setattr("detaudit.hooks.generator_survey._PUT_BACK", frozenset({"cpu", "cuda"}))
    with generators.survey() as seen:
        torch.empty(3, device="meta").uniform_()
        torch.empty(3, device="meta").uniform_()
    reason = "aten.uniform_.default draws on a device whose generator is not known here"
    assert seen.lost == [("meta generator", reason)]
    assert generators.capture().with_survey(seen).describe()["meta generator"].endswith(reason)


def test_survey_stops_keeping_generators_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("detaudit.hooks.generator_survey.SURVEY_LIMIT", 2)
    with generators.survey() as seen:
        for _ in range(5):
            torch.rand(1, generator=torch.Generator())
    assert len(seen.found) == 2
    assert [name for name, _ in seen.lost] == ["private generators"]


def test_restore_works_under_modes_and_default_devices_of_the_target() -> None:
    states = generators.capture()
    first = torch.rand(3)
    with generators.survey() as seen, torch.device("meta"):
        assert generators.restore(states) == ()
    assert seen.drew == {}
    assert torch.equal(torch.rand(3), first)


FRESH = """
import sys
from detaudit.hooks import generators
before = generators.capture()
print(before.names)
import numpy.random
print([name for name, _ in generators.restore(before)])
after = generators.adopt(before)
print(after.names, generators.restore(after))
a = numpy.random.random(); generators.restore(after); print(a == numpy.random.random())
"""


def test_a_library_imported_by_the_first_run_is_named_then_adopted() -> None:
    # Without NumPy on the path torch itself does not import it; it is added for the import in the middle.
    hide = "import sys; sys.modules['numpy'] = None\nimport torch\ndel sys.modules['numpy']\n"
    done = subprocess.run([sys.executable, "-c", hide + FRESH], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "('python', 'cpu')",
        "['numpy']",
        "('python', 'cpu', 'numpy') ()",
        "True",
    ]


def test_states_carry_over_to_a_fresh_process() -> None:
    draw = "import random, numpy, torch; print(random.random(), numpy.random.normal(), torch.rand(()).item())"
    take = (
        "import sys; from detaudit.hooks.generators import load; assert load(sys.stdin.buffer.read()) == ();"
    )
    dumped = generators.capture(Noisy()).dump()
    here = f"{random.random()} {np.random.normal()} {torch.rand(()).item()}"
    done = subprocess.run(
        [sys.executable, "-c", "import numpy;" + take + draw], input=dumped, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == here
