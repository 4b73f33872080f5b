"""One operator of torch, called with the arguments it had inside the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from detaudit.repro.parts.case import Case, Saved
from detaudit.repro.parts.errors import Unsupported
from detaudit.repro.parts.measure import Run


class Operator:
    """``torch.ops.<namespace>.<name>.<overload>``; every run gets copies of the captured arguments."""

    racy = "as captured"
    stable = "torch.use_deterministic_algorithms(True)"
    switch = "--deterministic"

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.device = saved.device
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise Unsupported("it was captured on a CUDA GPU, and torch finds none here")
        if self.device.type == "cpu" and torch.get_num_threads() == 1:
            raise Unsupported("torch runs on one CPU thread, and one thread has one order")
        namespace, name, overload = saved.entry.partition(":")[2].split(".")
        try:
            self.function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        except AttributeError as error:
            raise Unsupported(f"this torch has no operator {saved.entry}") from error

    def run(self, *, stable: bool) -> Run:
        def once() -> Sequence[Tensor]:
            case = self.saved.on(self.device)
            before = torch.get_deterministic_debug_mode()
            # What torch.use_deterministic_algorithms does, which also imports all of inductor.
            torch.set_deterministic_debug_mode("error" if stable else "default")
            torch.manual_seed(0)
            try:
                return self._once(case)
            finally:
                torch.set_deterministic_debug_mode(before)

        if stable:
            try:
                once()
            except RuntimeError as error:
                raise Unsupported(" ".join(str(error).split())) from error
        return once

    def _once(self, case: Case) -> Sequence[Tensor]:
        args = [_value(item, case) for item in case.parameters["args"]]
        kwargs = {name: _value(item, case) for name, item in case.parameters["kwargs"].items()}
        found = _tensors(self.function(*args, **kwargs))
        written = [case.tensors[name] for name in case.parameters["written"]]
        return found + [tensor for tensor in written if all(tensor is not other for other in found)]


def _value(item: Any, case: Case) -> Any:
    """An argument as it was: a tensor by its path, what JSON has no form for by its name."""
    if isinstance(item, list):
        return [_value(part, case) for part in item]
    if not isinstance(item, Mapping):
        return item
    (kind, text), *_ = item.items()
    if kind == "tensor":
        return case.tensors[text]
    if kind == "float":
        return float(text)
    return torch.device(text) if kind == "device" else getattr(torch, text)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
