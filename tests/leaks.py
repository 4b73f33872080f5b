"""What a test must leave as it found it: everything of ours on torch, and torch's global settings."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("detaudit", "hooks", "kernels"))


@dataclass(frozen=True)
class Setting:
    """A global setting: how to read it, and how to put it back (None: it cannot be)."""

    read: Callable[[], Any]
    write: Callable[[Any], None] | None = None


def settings() -> dict[str, Setting]:
    """torch's global settings by name; none where torch has not been imported."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn"):
        return {}
    from torch.nn.modules import module as hooks

    def default_device() -> str:
        try:
            return str(torch.get_default_device())
        except AttributeError:  # torch 2.9 after set_default_device(None)
            return "cpu"

    found = {
        "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "default device": Setting(default_device, torch.set_default_device),
        "deterministic algorithms": Setting(
            torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
        ),
        "matmul precision": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
        "grad mode": Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "inference mode": Setting(torch.is_inference_mode_enabled),
        "autocast": Setting(torch.is_autocast_enabled, torch.set_autocast_enabled),
        "anomaly mode": Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "function modes": Setting(torch._C._len_torch_function_stack),
        "dispatch modes": Setting(torch._C._len_torch_dispatch_stack),
        "tracing state": Setting(torch._C._get_tracing_state),
        "nn.Module.__call__": Setting(
            lambda: torch.nn.Module.__call__, lambda value: setattr(torch.nn.Module, "__call__", value)
        ),
        "create_script_module": Setting(lambda: torch.jit._recursive.create_script_module),
    }
    for name in ("capture_begin", "capture_end", "replay", "reset"):
        found[f"CUDAGraph.{name}"] = Setting(functools.partial(getattr, torch.cuda.CUDAGraph, name))
    for name in ("fill_uninitialized_memory",):
        found[name] = _attribute(torch.utils.deterministic, name)
    for name in ("deterministic", "benchmark", "enabled"):
        found[f"cudnn.{name}"] = _attribute(torch.backends.cudnn, name)
    for name in (n for n in vars(hooks) if n.startswith("_global_") and isinstance(vars(hooks)[n], dict)):
        found[name] = Setting(functools.partial(tuple, vars(hooks)[name]))
    return found


def _attribute(owner: Any, name: str) -> Setting:
    return Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def wrapped_methods() -> Iterator[str]:
    """``__call__`` and ``forward`` of module classes that are functions of ours now."""
    torch = sys.modules.get("torch")
    classes = [torch.nn.Module] if torch is not None and hasattr(torch, "nn") else []
    seen: set[type] = set()
    while classes:
        cls = classes.pop()
        if cls in seen:
            continue
        seen.add(cls)
        classes.extend(type.__subclasses__(cls))
        for base in cls.__mro__:
            for name in ("__call__", "forward"):
                if _is_wrapper(base.__dict__.get(name)):
                    yield f"{base.__qualname__}.{name}"


def _is_wrapper(method: object) -> bool:
    if not inspect.isfunction(method) or not hasattr(method, "__wrapped__"):
        return False
    return method.__code__.co_filename.startswith(OURS)


class GlobalState:
    """Global state at one moment, to be compared with a later one."""

    def __init__(self) -> None:
        self._values = {name: setting.read() for name, setting in settings().items()}

    def leftovers(self) -> list[str]:
        """What differs now, in words."""
        now = {name: setting.read() for name, setting in settings().items()}
        changed = [
            f"{name} was {self._values[name]!r} and is {value!r}"
            for name, value in now.items()
            if name in self._values and self._values[name] != value
        ]
        return changed + [f"{name} is still wrapped" for name in wrapped_methods()]

    def put_back(self) -> None:
        """Undo what can be undone, so that one test's leftovers do not fail the next."""
        for name, setting in settings().items():
            if setting.write is not None and name in self._values and setting.read() != self._values[name]:
                setting.write(self._values[name])
        _unwrap_methods()


def _unwrap_methods() -> None:
    for path in list(wrapped_methods()):
        for cls in _classes_named(path.rpartition(".")[0]):
            name = path.rpartition(".")[2]
            method: Any = cls.__dict__.get(name)
            if _is_wrapper(method):
                setattr(cls, name, method.__wrapped__)


def _classes_named(qualname: str) -> Iterator[type]:
    import torch

    pending: list[type] = [torch.nn.Module]
    while pending:
        cls = pending.pop()
        pending.extend(type.__subclasses__(cls))
        yield from (base for base in cls.__mro__ if base.__qualname__ == qualname)
