"""A function call's arguments as data: tensors by path, everything else JSON-compatible."""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from detaudit.core.digest import dtype_name
from detaudit.hooks.tree import Opaque, flatten


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor that was seen and not kept. ``alignment`` is the largest power of two (up to 256) that divides
    its address, in bytes; 0 where it has no address."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    alignment: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        strided = tensor.layout is torch.strided and not tensor.is_nested
        strides = tuple(tensor.stride()) if strided else ()
        return cls(
            dtype_name(tensor.dtype), tuple(tensor.shape), strides, str(tensor.device), _alignment(tensor)
        )


def _alignment(tensor: Tensor) -> int:
    try:
        address = tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
    return min(address & -address, 256)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Args:
    tensors: path to tensor: ``input``, ``quant_scales[2]``, ``args[0]`` where a name is not known.
    parameters: name to value for arguments without tensors; of arguments with tensors in them what is not a
        tensor, by path (``quant_scales[1]``: None). dtypes and enum members are given by name.
    defaults: parameters that were not passed, with the values the function gives them.
    """

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, object]
    defaults: Mapping[str, object]


def bind(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Arguments by the names the signature gives them; by position where it does not fit."""
    named: dict[str, Any] = {f"args[{i}]": arg for i, arg in enumerate(args)} | dict(kwargs)
    defaults: dict[str, object] = {}
    if signature is not None:
        try:
            named = _names(signature, signature.bind(*args, **kwargs))
        except TypeError:
            pass  # the function is about to say so itself
        else:
            defaults = {
                name: as_json(parameter.default)
                for name, parameter in signature.parameters.items()
                if name not in named and parameter.default is not inspect.Parameter.empty
            }
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, object] = {}
    for name, value in named.items():
        leaves = list(flatten(value, name))
        if any(isinstance(leaf, Tensor) for _, leaf in leaves):
            tensors |= {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
            parameters |= {path: as_json(leaf) for path, leaf in leaves if not isinstance(leaf, Tensor)}
        else:
            parameters[name] = as_json(value)
    return Arguments(tensors, parameters, defaults)


def _names(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named |= {f"{name}[{i}]": item for i, item in enumerate(value)}
        else:
            named[name] = value
    return named


def as_json(value: object) -> object:
    """The value in JSON: dtypes and enum members by name, devices as text, other objects by class (and
    fields)."""
    match value:
        case enum.Enum():
            return value.name
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case torch.dtype():
            return dtype_name(value)
        case torch.device() | complex():
            return str(value)
        case list() | tuple() | torch.Size():
            return [as_json(item) for item in value]
        case dict():
            return {str(key): as_json(item) for key, item in value.items()}
        case Opaque():
            return {"object": value.reason}
    described: dict[str, object] = {"object": f"{type(value).__module__}.{type(value).__qualname__}"}
    if is_dataclass(value):
        described["fields"] = {
            field.name: as_json(getattr(value, field.name, None)) for field in fields(value)
        }
    return described
