"""Digests of a value's leaves, and what is said where there is none."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from detaudit.core.digest import HostDigester, NotObservable, digest, scalar_value
from detaudit.hooks.observe import Observer, observe
from tests.support import LateDigester, RefusingDigester, sites


class Mode(enum.Enum):
    FAST = 1


def record(value: object) -> dict[str, Any]:
    resolved, unobserved = observe(value, "x", HostDigester()).resolve()
    assert unobserved == ()
    return dict(resolved)


def test_tensors_and_scalars() -> None:
    t = torch.arange(6).view(2, 3)
    assert record({"t": t, "n": 3, "s": "a", "f": 0.5, "none": None, "flag": True}) == {
        "x.t": digest(t),
        "x.n": scalar_value(3),
        "x.s": scalar_value("a"),
        "x.f": scalar_value(0.5),
        "x.none": scalar_value(None),
        "x.flag": scalar_value(True),
    }


def test_equal_scalars_of_other_types_differ() -> None:
    assert record(1) != record(True)
    assert record(1) != record(1.0)
    assert record(0.0) != record(-0.0)
    assert record(None) != record("None")


def test_the_record_is_sorted_by_site() -> None:
    resolved, _ = observe({"b": 1, "a": [2, 3]}, "x", HostDigester()).resolve()
    assert sites(resolved) == ["x.a[0]", "x.a[1]", "x.b"]


def test_parts_of_other_tensors_are_sites() -> None:
    assert len(record(torch.eye(3).to_sparse())) > 1


def test_a_generator_is_its_state() -> None:
    generator = torch.Generator().manual_seed(1)
    before = record(generator)
    assert record(torch.Generator().manual_seed(1)) == before
    torch.rand(1, generator=generator)
    assert record(generator) != before


def test_arrays_are_observed_and_not_changed() -> None:
    array = np.arange(4.0)
    assert record(array) == {"x": digest(torch.arange(4.0, dtype=torch.float64))}
    array.flags.writeable = False
    assert record(array) == {"x": digest(torch.arange(4.0, dtype=torch.float64))}
    assert not array.flags.writeable


def test_enums_dtypes_devices() -> None:
    assert set(record([Mode.FAST, torch.float32, torch.device("cpu")])) == {"x[0]", "x[1]", "x[2]"}


@pytest.mark.parametrize("value", [nn.ReLU(), torch.relu, int, record, torch])
def test_what_holds_no_data_is_passed_over(value: object) -> None:
    assert record(value) == {}


def test_what_cannot_be_observed_is_listed() -> None:
    value = {"meta": torch.empty(2, device="meta"), "object": object(), "array": np.array(["text"])}
    resolved, unobserved = observe(value, "x", HostDigester()).resolve()
    assert resolved == ()
    assert {site for site, _ in unobserved} == {"x.meta", "x.object", "x.array"}
    assert all(reason and "\n" not in reason for _, reason in unobserved)


def test_a_digester_that_fails_is_a_reason() -> None:
    _, unobserved = observe([torch.tensor(1.0), torch.ones(2)], "x", RefusingDigester()).resolve()
    assert unobserved == (("x[0]", "it is refused"), ("x[1]", "RuntimeError: out of memory"))


def test_pendings_are_read_only_after_finish() -> None:
    digester = LateDigester()
    pending = observe([torch.ones(2), 1], "x", digester)
    with pytest.raises(RuntimeError, match="before finish"):
        pending.resolve()
    digester.finish()
    assert sites(pending.resolve()[0]) == ["x[0]", "x[1]"]


def test_a_digest_is_of_the_moment_it_was_submitted() -> None:
    t = torch.zeros(3)
    pending = observe(t, "x", HostDigester())
    t.add_(1)
    assert pending.resolve()[0][0][1] == digest(torch.zeros(3))


def test_a_tensor_is_digested_once_in_a_moment() -> None:
    digester = LateDigester()
    observer, t = Observer(digester), torch.ones(2)
    record = observer.observe([("a", t), ("b", t)])
    observer.flush()
    assert digester.submitted == 1
    observer.observe([("a", t)])
    observer.flush()
    assert digester.submitted == 2
    digester.finish()
    assert sites(record.resolve()[0]) == ["a", "b"]


def test_one_tensor_that_is_refused_does_not_take_the_others_along() -> None:
    class Picky(HostDigester):
        def submit(self, tensor: torch.Tensor) -> Any:
            if tensor.numel() == 3:
                raise NotObservable("three is too many")
            return super().submit(tensor)

        def submit_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
            return [self.submit(tensor) for tensor in tensors]

    resolved, unobserved = observe([torch.ones(2), torch.ones(3), torch.ones(4)], "x", Picky()).resolve()
    assert sites(resolved) == ["x[0]", "x[2]"]
    assert unobserved == (("x[1]", "three is too many"),)


def test_modes_and_defaults_of_the_target_are_not_seen() -> None:
    t = torch.arange(6.0).requires_grad_()
    plain = record([t, np.ones(2)])
    with torch.device("meta"), torch.inference_mode():
        assert record([t, np.ones(2)]) == plain
