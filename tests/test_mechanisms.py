"""What is known of operators that can differ."""

from __future__ import annotations

import pytest
import torch

from detaudit.core.mechanisms import _MECHANISMS, mechanism


@pytest.mark.parametrize(
    "operator", ["aten.index_put_.default", "aten._index_put_impl_.default", "aten.scatter_add.default"]
)
def test_overloads_and_in_place_forms_are_known(operator: str) -> None:
    assert "in which they arrive" in str(mechanism(operator))


@pytest.mark.parametrize("operator", ["aten.mm.default", "mylib.index_put_.default", "nonsense"])
def test_nothing_is_claimed_of_others(operator: str) -> None:
    assert mechanism(operator) is None


@pytest.mark.parametrize("name", sorted(_MECHANISMS))
def test_every_name_is_an_operator_of_torch(name: str) -> None:
    assert hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"{name}_")
