"""One call of a torch operator as a case: its tensors by path, the rest in JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from detaudit.core.digest import dtype_name
from detaudit.core.errors import DetauditError, Unsupported
from detaudit.core.records import Origin
from detaudit.hooks.operator_inputs import OperatorInputs
from detaudit.kernels.cases import Case
from detaudit.repro.script import OPERATORS


def save_operators(kept: Sequence[tuple[Origin, OperatorInputs]], folder: Path) -> dict[str, str]:
    """Save the operators that differ, each as ``<folder>/operator-<module>#<call>``.

    Returns:
        Module path to the reason, where one could not be kept.
    """
    reasons: dict[str, str] = {}
    for origin, inputs in kept:
        name = f"{origin.module or 'root'}#{origin.call}"
        try:
            if inputs.reason is not None:
                raise Unsupported(inputs.reason)
            operator_case(name, origin, inputs).save(folder / f"operator-{name.replace('/', '_')}")
        except DetauditError as error:
            reasons[origin.module] = str(error)
    return reasons


def operator_case(name: str, origin: Origin, inputs: OperatorInputs) -> Case:
    """The case of a kept operator call.

    Parameters are ``args`` and ``kwargs``, in which ``{"tensor": PATH}`` stands for a tensor and
    ``{"dtype": NAME}`` and the like for what JSON has no form for; ``written`` lists the tensors that the
    operator writes to.

    Raises:
        Unsupported: an argument cannot be kept (a generator, a sparse tensor).
    """
    tensors: dict[str, Tensor] = {}
    args = [_as_json(item, f"args[{i}]", tensors) for i, item in enumerate(inputs.args)]
    kwargs = {key: _as_json(item, f"kwargs.{key}", tensors) for key, item in inputs.kwargs.items()}
    parameters = {"args": args, "kwargs": kwargs, "written": _written(inputs.function, tensors)}
    case = Case(name, f"{OPERATORS}{inputs.function}", tensors, parameters, origin.module, origin.call)
    context = {"device": str(case.device), "threads": torch.get_num_threads(), "library": "torch"}
    return Case(name, case.entry, tensors, parameters, origin.module, origin.call, context)


def _as_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            tensors[path] = value.detach().resolve_conj().resolve_neg()
            return {"tensor": path}
        case list() | tuple():
            return [_as_json(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
        case float() if not math.isfinite(value):
            return {"float": str(value)}
        case None | bool() | int() | float() | str():
            return value
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": str(value)}
        case torch.layout() | torch.memory_format():
            return {"constant": str(value).removeprefix("torch.")}
    raise Unsupported(f"argument {path} is a {type(value).__name__}, which cannot be kept")


def _written(function: Any, tensors: dict[str, Tensor]) -> list[str]:
    """Paths of the tensors that the operator's schema says it writes to."""
    names: set[str] = set()
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names |= {f"args[{index}]", f"kwargs.{argument.name}"}
    return [path for path in tensors if path in names or path.rpartition("[")[0] in names]
