"""Parameter and gradient records."""

from __future__ import annotations

import torch
from torch import nn

from detaudit.core.digest import HostDigester, digest
from detaudit.hooks.parameters import gradient_record, parameter_record


def test_every_parameter_once_by_its_path() -> None:
    layer = nn.Linear(2, 3)
    model = nn.Sequential(layer, nn.BatchNorm1d(3), layer)
    record, unobserved = parameter_record(HostDigester(), model).resolve()
    assert [site for site, _ in record] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert dict(record)["0.weight"] == digest(layer.weight)
    assert unobserved == ()


def test_a_change_of_one_bit_changes_its_site_only() -> None:
    model = nn.Linear(2, 3)
    before = dict(parameter_record(HostDigester(), model).resolve()[0])
    model.bias.data.view(torch.int32)[0] ^= 1
    after = dict(parameter_record(HostDigester(), model).resolve()[0])
    assert {site for site in before if before[site] != after[site]} == {"bias"}


def test_gradients_are_those_a_run_left() -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    assert gradient_record(HostDigester(), model).resolve() == ((), ())
    model(torch.ones(1, 2)).sum().backward()
    record, _ = gradient_record(HostDigester(), model).resolve()
    assert model.weight.grad is not None
    assert record == (("grad.weight", digest(model.weight.grad)),)


def test_what_has_no_bytes_is_unobserved() -> None:
    record, unobserved = parameter_record(HostDigester(), nn.Linear(2, 2, device="meta")).resolve()
    assert record == ()
    assert [site for site, _ in unobserved] == ["weight", "bias"]
