"""A kernel case: one call of a kernel's Python entry point, captured or synthetic, that can be run again.

On disk a case is a folder: ``tensors.safetensors`` with the bytes and ``case.json`` with all else.

Format history: 1, first version.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from detaudit.core.errors import CaseUnreadable, TraceNotWritten, Unsupported
from detaudit.core.files import not_written
from detaudit.core.recording import KernelCall
from detaudit.kernels.layout import Block, View, check_plain, dtype_name, dtype_of, pack, unpack

FORMAT = "detaudit-case"
VERSION = 1
DESCRIPTION = "case.json"
TENSORS = "tensors.safetensors"

# Dtypes that every supported safetensors release stores by name; other blocks are stored as plain bytes.
_NAMED = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One call of ``entry`` with everything needed to repeat it.

    Args:
        name: how reports call it.
        entry: ``module:function``, such as ``flashinfer.fused_moe:cutlass_fused_moe``.
        tensors: argument path to tensor (``input``, ``quant_scales[2]``); plain strided tensors.
        parameters: every other argument, JSON-compatible; a dtype by its name (``bfloat16``).
        module: path of the module the call happened in; ``None`` for a synthetic case.
        call: ordinal of that module's call.
        context: library version, autotuner state and the like, JSON-compatible; ``device`` is where the
            call happened.

    Raises:
        Unsupported: an argument is a sparse, quantized, meta or wrapper tensor.
    """

    name: str
    entry: str
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    module: str | None = None
    call: int | None = None
    context: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tensor in self.tensors.items():
            check_plain(name, tensor)

    @classmethod
    def from_kernel_call(cls, call: KernelCall) -> Case:
        """The tensors are taken as they are, not copied: the tap that captured the call has cloned them."""
        tensors: dict[str, Tensor] = {}
        for path, value in call.tensors.items():
            if not isinstance(value, Tensor):
                raise Unsupported(
                    f"argument {path} is a {type(value).__name__}, not a tensor; it cannot be rerun"
                )
            tensors[path] = value.detach().resolve_conj().resolve_neg()
        name = f"{call.module or 'root'}#{call.call}"
        case = cls(name, call.entry, tensors, dict(call.parameters), call.module, call.call)
        return dataclasses.replace(case, context={"device": str(case.device), **call.context})

    @property
    def device(self) -> torch.device:
        """Where the tensors lie; a case without tensors counts as lying on the CPU."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def dtype(self, parameter: str) -> torch.dtype:
        """A parameter that names a dtype. Raises CaseUnreadable if it is missing or names none."""
        try:
            return dtype_of(self.parameters[parameter])
        except (KeyError, AttributeError, ValueError) as error:
            raise CaseUnreadable(
                f"case {self.name}: parameter {parameter!r} names no dtype ({error})"
            ) from error

    def to(self, device: torch.device) -> Case:
        """This case on ``device``, strides, alignment and aliasing kept; itself if it is there already."""
        if all(tensor.device == device for tensor in self.tensors.values()):
            return self
        blocks, views = pack(self.tensors)
        return dataclasses.replace(self, tensors=unpack(blocks, views, device))

    def group(self, argument: str) -> list[Tensor]:
        """The tensors of a list argument, in order: ``argument[0]``, ``argument[1]``, ..."""
        found: list[Tensor] = []
        while (tensor := self.tensors.get(f"{argument}[{len(found)}]")) is not None:
            found.append(tensor)
        return found

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the case as ``folder``, all of it or nothing. An existing folder is never overwritten.

        Raises:
            TraceNotWritten: the folder exists or cannot be written.
            Unsupported: a parameter is not JSON-compatible.
        """
        target = Path(folder)
        if os.path.lexists(target):
            raise TraceNotWritten(
                f"{target} exists already; a case is never overwritten, choose another folder"
            )
        description, stored = self._to_files()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            try:
                save_file(stored, partial / TENSORS)
                (partial / DESCRIPTION).write_text(description, encoding="utf-8")
                partial.chmod(0o755)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        except OSError as error:
            raise not_written(target, error) from error
        except SafetensorError as error:  # what it makes of a full disk
            raise TraceNotWritten(f"cannot write {target}: {error}; choose another folder") from error
        return target

    def _to_files(self) -> tuple[str, dict[str, Tensor]]:
        blocks, views = pack(self.tensors)
        stored: dict[str, Tensor] = {}
        block_entries: dict[str, dict[str, Any]] = {}
        for name, block in blocks.items():
            data = block.data.to("cpu", copy=True)
            block_entries[name] = {
                "bytes": data.numel(),
                "alignment": block.alignment,
                "xxh3_64": _checksum(data),
            }
            stored[name] = _named(data, self.tensors[name])
        body = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "entry": self.entry,
            "module": self.module,
            "call": self.call,
            "parameters": self.parameters,
            "context": self.context,
            "tensors": {name: dataclasses.asdict(view) for name, view in views.items()},
            "blocks": block_entries,
        }
        try:
            return json.dumps(body, indent=1), stored
        except (TypeError, ValueError) as error:
            raise Unsupported(f"case {self.name} has a parameter that JSON cannot hold: {error}") from error

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Case:
        """Read a saved case; its tensors lie on the CPU.

        Raises:
            CaseUnreadable: missing, damaged, or of a version this detaudit does not know.
        """
        source = Path(folder)
        body = _read_description(source)
        try:
            views = {
                name: View(v["block"], v["dtype"], tuple(v["shape"]), tuple(v["strides"]), v["offset"])
                for name, v in body["tensors"].items()
            }
            tensors = unpack(_read_blocks(source, body["blocks"]), views, torch.device("cpu"))
            return cls(
                name=body["name"],
                entry=body["entry"],
                tensors=tensors,
                parameters=body["parameters"],
                module=body["module"],
                call=body["call"],
                context=body["context"],
            )
        except FileNotFoundError as error:
            raise CaseUnreadable(f"the case {source} has no {TENSORS}; capture it again") from error
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            RuntimeError,
            OSError,
            SafetensorError,
        ) as error:
            what = " ".join(str(error).split())
            raise CaseUnreadable(f"the case {source} is damaged ({what}); capture it again") from error


def _checksum(data: Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(data.numpy().data)


def _named(data: Tensor, tensor: Tensor) -> Tensor:
    """The block under its tensor's dtype and shape where it is that tensor and no more, else as bytes."""
    whole = tensor.is_contiguous() and tensor.nbytes == data.numel()
    if whole and dtype_name(tensor.dtype) in _NAMED:
        return data.view(tensor.dtype).view(tensor.shape)
    return data


def _read_description(source: Path) -> dict[str, Any]:
    try:
        body = json.loads((source / DESCRIPTION).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CaseUnreadable(
            f"{source} is not a kernel case; expected a folder with {DESCRIPTION}"
        ) from error
    except (OSError, ValueError) as error:
        raise CaseUnreadable(f"the case {source} cannot be read: {error}; capture it again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CaseUnreadable(f"{source / DESCRIPTION} is not a {FORMAT} file")
    if (version := body.get("version")) != VERSION:
        raise CaseUnreadable(
            f"the case {source} has version {version!r}, this detaudit reads {VERSION}; upgrade detaudit"
        )
    return body


def _read_blocks(source: Path, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Block]:
    blocks: dict[str, Block] = {}
    with safe_open(source / TENSORS, framework="pt", device="cpu") as file:
        for name, entry in entries.items():
            data = file.get_tensor(name).reshape(-1).view(torch.uint8)
            if data.numel() != entry["bytes"] or _checksum(data) != entry["xxh3_64"]:
                raise ValueError(f"the bytes of {name} are not those that were saved")
            blocks[name] = Block(data, entry["alignment"])
    return blocks
