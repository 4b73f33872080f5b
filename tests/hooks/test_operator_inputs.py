"""Keeping what one operator inside a module is handed, before it changes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from detaudit.hooks.operator_inputs import OperatorInputs

NAME = "aten.add_.Tensor"


class Doubler(nn.Module):
    """Two in-place additions; the second is handed what the first one made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.add_(x)
        y.add_(y.t().t(), alpha=3)
        return y


def run(**changes: object) -> OperatorInputs:
    wanted: dict[str, object] = {"at": ("m", 0), "index": 1, "name": NAME, "budget": 1 << 20}
    inputs = OperatorInputs(lambda: ("m", 0), **(wanted | changes))  # type: ignore[arg-type]
    x = torch.arange(6.0).view(2, 3)
    with inputs:
        Doubler()(x)
    return inputs


def test_the_operator_at_that_place_with_its_arguments_as_they_were() -> None:
    inputs = run()
    assert inputs.reason is None
    assert str(inputs.function) == NAME
    assert torch.equal(inputs.args[0], torch.arange(6.0).view(2, 3))  # not yet doubled
    assert inputs.bytes == 48
    last = run(index=4)
    assert last.reason is None
    assert last.kwargs == {"alpha": 3}
    assert torch.equal(last.args[0], 2 * torch.arange(6.0).view(2, 3))
    assert last.args[0].untyped_storage().data_ptr() == last.args[1].untyped_storage().data_ptr()


def test_nothing_where_another_operator_ran_or_the_module_was_not_called() -> None:
    for changes in ({"index": 0}, {"index": 99}, {"at": ("m", 1)}, {"at": ("other", 0)}):
        inputs = run(**changes)
        assert inputs.args == ()
        assert inputs.reason == f"{NAME} did not run there again"


def test_a_copy_that_fails_does_not_reach_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("detaudit.hooks.operator_inputs.copy_of", fail)
    assert run().reason == f"the arguments of {NAME} could not be copied (OutOfMemoryError)"


def test_the_budget() -> None:
    inputs = run(budget=47)
    assert inputs.args == ()
    assert inputs.bytes == 0
    assert inputs.reason is not None
    assert "hold 48 bytes and 47 may be kept; raise --capture-bytes" in inputs.reason
