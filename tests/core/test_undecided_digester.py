"""The digester of scripts: the host's until a CUDA tensor comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from detaudit.core import undecided_digester
from detaudit.core.digest import HostDigester, digest
from detaudit.core.undecided_digester import UndecidedDigester


class OnCuda:
    """Looks like a CUDA tensor to somebody who only asks where it is."""

    is_cuda = True
    device = torch.device("cuda", 0)


def test_host_tensors_are_digested_on_the_host_and_cuda_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        undecided_digester, "make_digester", lambda device: pytest.fail(f"asked for {device}")
    )
    digester, tensor = UndecidedDigester(), torch.arange(6.0)
    (pending,) = digester.submit_all([tensor])
    digester.finish()
    assert pending.value == digester.submit(tensor).value == digest(tensor)
    assert digester.submit_scalar(3).value.dtype == "python.int"
    assert digester.notes == ()


def test_the_first_cuda_tensor_decides_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    class Device(HostDigester):
        def submit(self, tensor: Any) -> Any:
            return ("device", tensor)

    def make(device: torch.device) -> Device:
        made.append(device)
        return Device(("on the device",))

    monkeypatch.setattr(undecided_digester, "make_digester", make)
    digester, tensor = UndecidedDigester(), OnCuda()
    before = digester.submit(torch.ones(2))
    assert digester.submit(tensor) == ("device", tensor)  # type: ignore[arg-type, comparison-overlap]
    assert digester.submit(tensor) == ("device", tensor)  # type: ignore[arg-type, comparison-overlap]
    assert made == [torch.device("cuda", 0)]
    assert before.value == digest(torch.ones(2))
    assert digester.notes == ("on the device",)
