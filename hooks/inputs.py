"""Copies of a run's inputs, so that what a run does to them reaches no other run and can be told.

A copy has the original's shape, strides, storage offset, dtype, conjugate and negative bits,
``requires_grad`` and pinning; tensors that share a storage go on sharing one. Parameters, modules and
generators are handed on as they are: they belong to the model.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

from detaudit.core.digest import NotObservable, as_words, parts, unseen
from detaudit.hooks.copies import Storages, copy_tensor
from detaudit.hooks.generator_sources import find
from detaudit.hooks.reach import reachable, step

_SHARED = (nn.Parameter, nn.Module, torch.Generator)


def holds_data(value: object) -> bool:
    """Whether it leads to a tensor, an array, a module or a generator."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (Tensor, nn.Module) if numpy is None else (Tensor, nn.Module, numpy.ndarray)
    return any(isinstance(item, kinds) for _, item in reachable("", value)) or any(find(value))


class InputCopies:
    """One run's inputs: ``value`` is what the run gets, the originals stay behind for comparison.

    Args:
        inputs: what ``make_inputs`` returned: a tensor, or containers and objects that lead to tensors.
        site: what the paths in ``mutated`` begin with.

    ``notes`` holds (path, reason) of what could not be copied faithfully.
    """

    def __init__(self, inputs: object, site: str = "inputs") -> None:
        self.notes: list[tuple[str, str]] = []
        self._pairs: list[tuple[str, Tensor, Tensor]] = []
        storages = Storages()
        memo: dict[int, Any] = {}
        for path, value in reachable(site, inputs):
            if isinstance(value, _SHARED):
                memo[id(value)] = value
            elif isinstance(value, Tensor):
                memo[id(value)] = self._copy(path, value, storages)
        self.value: Any = self._rebuild(site, inputs, memo)

    def mutated(self) -> tuple[str, ...]:
        """Paths of the input tensors that the run changed in place: bits, shape, strides or dtype.

        Compares on the tensors' own device and so synchronises; call it after the run.
        """
        return tuple(path for path, original, given in self._pairs if not _same(original, given))

    def _copy(self, path: str, tensor: Tensor, storages: Storages) -> Tensor:
        if tensor.grad_fn is not None:
            self.notes.append((path, "it has a gradient history, which the copy has not"))
        try:
            twin = copy_tensor(tensor, storages)
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            self.notes.append((path, f"not copied ({type(error).__name__}: {error})".splitlines()[0]))
            return tensor
        self._pairs.append((path, tensor, twin))
        return twin

    def _rebuild(self, path: str, value: object, memo: dict[int, Any]) -> object:
        """``value`` with the tensors of ``memo`` in place of its own; objects that refuse are shared."""
        try:
            return copy.deepcopy(value, dict(memo))
        except Exception as error:  # user classes: locks, handles, their own __deepcopy__
            reason = f"{type(value).__name__} not copied ({type(error).__name__}: {error})".splitlines()[0]
        match value:
            case dict() if type(value) is dict:
                return {key: self._rebuild(path + step(key), item, memo) for key, item in value.items()}
            case list() | tuple() if type(value) in (list, tuple):
                return type(value)(self._rebuild(f"{path}[{i}]", item, memo) for i, item in enumerate(value))
        self.notes.append((path, reason))
        return value


def _same(original: Tensor, given: Tensor) -> bool:
    if original is given:
        return True
    try:
        ours, theirs = parts(original), parts(given)
    except NotObservable:
        return True
    return len(ours) == len(theirs) and all(
        name == other and _same_bits(a, b) for (name, a), (other, b) in zip(ours, theirs, strict=True)
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if (a.dtype, a.device, a.shape, a.stride()) != (b.dtype, b.device, b.shape, b.stride()):
        return False
    with unseen():
        return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    # As integers: a NaN equals itself then, and -0.0 is not 0.0.
    return as_words(torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor)
