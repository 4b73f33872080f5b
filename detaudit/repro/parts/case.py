"""The captured call, read from the two files beside the script."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from detaudit.repro.parts.errors import UsageError

ALIGNMENT = 256


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call: tensors by argument path, and its other arguments."""

    name: str
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any]


class Saved:
    """``case.json`` and ``tensors.safetensors``. docs/kernels.md of detaudit describes the format.

    Raises:
        UsageError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._read(folder)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UsageError(f"the call in {folder} cannot be read: {error}") from error

    def _read(self, folder: Path) -> None:
        self.description: dict[str, Any] = json.loads((folder / "case.json").read_text(encoding="utf-8"))
        tensors = folder / "tensors.safetensors"
        with safe_open(str(tensors), framework="pt") as file:
            self._blocks: dict[str, Tensor] = {
                name: file.get_tensor(name).reshape(-1).view(torch.uint8)
                for name in file.keys()  # noqa: SIM118
            }

    @property
    def entry(self) -> str:
        return str(self.description["entry"])

    @property
    def device(self) -> torch.device:
        """Where the call was captured."""
        return torch.device(self.description["context"].get("device", "cpu"))

    def on(self, device: torch.device) -> Case:
        """New tensors with the bits, strides, alignment and aliasing that were captured."""
        alignments = {name: block["alignment"] for name, block in self.description["blocks"].items()}
        copies = {name: _aligned(data, alignments[name], device) for name, data in self._blocks.items()}
        tensors = {name: _view(view, copies, device) for name, view in self.description["tensors"].items()}
        return Case(str(self.description["name"]), tensors, self.description["parameters"])


def _aligned(data: Tensor, alignment: int, device: torch.device) -> Tensor:
    buffer = torch.empty(data.numel() + ALIGNMENT, dtype=torch.uint8, device=device)
    shift = (alignment - buffer.data_ptr()) % ALIGNMENT
    return buffer[shift : shift + data.numel()].copy_(data)


def _view(view: Mapping[str, Any], blocks: Mapping[str, Tensor], device: torch.device) -> Tensor:
    dtype: torch.dtype = getattr(torch, view["dtype"])
    if view["block"] is None or math.prod(view["shape"]) == 0:
        return torch.empty_strided(view["shape"], view["strides"], dtype=dtype, device=device)
    block = blocks[view["block"]]
    offset = (int(block.storage_offset()) + view["offset"]) // dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(block.untyped_storage(), offset, view["shape"], view["strides"])
