"""The function tap: calls of listed functions, seen with their arguments, however they were imported.

Entries are written ``module:function`` (``flashinfer.fused_moe:cutlass_fused_moe``) or
``module:Class.method``. Nothing is imported for them: a function that is there already is replaced wherever
it is referred to, one that is not is replaced right after its module's code has run. On leaving, every
reference gets the original back; a reference that cannot be reached (in a tuple, say) keeps a wrapper that
only forwards.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from detaudit.core.errors import UsageError
from detaudit.core.recording import CallKey, KernelCall
from detaudit.hooks.arguments import Arguments, TensorLayout, bind
from detaudit.hooks.copies import Storages, copy_tensor
from detaudit.hooks.imports import ImportWatch
from detaudit.hooks.references import replace_references

CALL_LIMIT = 100_000
OUTSIDE = ("", -1)
"""Module path and ordinal of a call that happened in no module."""

Keep = Callable[[str, CallKey], bool]
Context = Callable[[], Mapping[str, object]]


def _never(entry: str, at: CallKey) -> bool:
    return False


class FunctionTap:
    """Records each call of the listed functions: ``with FunctionTap([...], recorder.current_call) as tap:
    ...``.

    A call is recorded before it is made, so one that raises is seen too; what it raises is not touched. While
    torch.compile traces, the tap steps aside.

    Args:
        entries: ``module:function`` or ``module:Class.method``.
        current_call: the innermost module call, or None outside of all modules.
        keep: asked for each call (entry, module call) whether its tensors are to be cloned; never by default.
        keep_bytes: budget for all clones together. Tensors that share a storage share one clone of it.
        context: by entry, what else to note with a call (autotuner state and the like), JSON-compatible.

    Raises:
        UsageError: an entry is not of one of these forms.
    """

    def __init__(
        self,
        entries: Iterable[str],
        current_call: Callable[[], CallKey | None],
        *,
        keep: Keep = _never,
        keep_bytes: int = 0,
        context: Mapping[str, Context] | None = None,
    ) -> None:
        self.calls: list[KernelCall] = []
        self.dropped = 0
        self.problems: dict[str, str] = {}
        self._texts = tuple(dict.fromkeys(entries))
        self._entries = self._parse()
        self._current_call = current_call
        self._keep = keep
        self._left = keep_bytes
        self._context = context or {}
        self._on = False
        self._imports = ImportWatch({e.module.partition(".")[0] for e in self._entries}, self._imported)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Entries whose function is not there: module not imported, or without such a name."""
        return tuple(entry.text for entry in self._entries if entry.original is None)

    def __enter__(self) -> FunctionTap:
        # Anew each time: a wrapper left over from before goes on with the entry it was made for.
        self._entries = self._parse()
        self._on = True
        self._imports.start()
        try:
            self.refresh()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._imports.stop()
        back = {id(e.wrapper): (e.wrapper, e.original) for e in self._entries if e.wrapper is not None}
        for entry in self._entries:
            entry.restore_method()
        if back:
            replace_references(back, self._own())
        for entry in self._entries:
            entry.forget()

    def _parse(self) -> list[_Entry]:
        return [_Entry.parse(text, self) for text in self._texts]

    def refresh(self) -> None:
        """Look again for functions that were not there: one that its package makes on first use, for
        instance."""
        fresh = [entry for entry in self._entries if entry.original is None and entry.find(self._taken())]
        pairs = {id(e.original): (e.original, e.wrapper) for e in fresh if not e.is_method}
        if pairs:
            replace_references(pairs, self._own())

    def _imported(self, name: str) -> None:
        if self._on:
            self.refresh()

    def _taken(self) -> set[int]:
        tapped = [entry for entry in self._entries if entry.wrapper is not None]
        return {id(entry.wrapper) for entry in tapped} | {id(entry.original) for entry in tapped}

    def _own(self) -> set[int]:
        # functools.wraps leaves the original in the wrapper's __dict__; it must stay there.
        return {id(vars(entry.wrapper)) for entry in self._entries if entry.wrapper is not None}

    def _call(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function: Any = entry.original
        if self._on and not torch.compiler.is_compiling():
            try:
                self._record(entry, args, kwargs)
            except Exception as error:  # whatever goes wrong here is ours, and not the target's to suffer
                self.problems[entry.text] = f"a call was not recorded ({type(error).__name__}: {error})"
        return function(*args, **kwargs)

    def _record(self, entry: _Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(self.calls) >= CALL_LIMIT:
            self.dropped += 1
            return
        at = self._current_call() or OUTSIDE
        arguments = bind(entry.signature, args, kwargs)
        context: dict[str, object] = {**_library(entry.module), "defaults": arguments.defaults}
        with suppress(Exception):
            context.update(self._context.get(entry.text, dict)())
        tensors: Mapping[str, object] = {path: TensorLayout.of(t) for path, t in arguments.tensors.items()}
        if self._keep(entry.text, at):
            kept, reason = self._clone(arguments)
            tensors = kept or tensors
            if reason:
                context["not_kept"] = reason
        self.calls.append(KernelCall(entry.text, *at, tensors, arguments.parameters, context))

    def _clone(self, arguments: Arguments) -> tuple[Mapping[str, Tensor], str]:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return {}, "the call was being captured in a CUDA graph"
        storages = Storages()
        needed = storages.bytes_needed(arguments.tensors.values())
        if needed > self._left:
            return {}, f"its {needed} bytes are more than the {self._left} left of the limit"
        clones = {path: copy_tensor(tensor.detach(), storages) for path, tensor in arguments.tensors.items()}
        self._left -= needed
        return clones, ""


class _Entry:
    """One listed function and, once it is there, the wrapper in its place.

    The original is held here and not in the wrapper's closure, where ``replace_references`` would find it.
    """

    __slots__ = ("_class", "_raw", "module", "names", "original", "signature", "tap", "text", "wrapper")

    def __init__(self, text: str, module: str, names: Sequence[str], tap: FunctionTap) -> None:
        self.text, self.module, self.names, self.tap = text, module, tuple(names), tap
        self.original: Any = None
        self.wrapper: Any = None
        self.signature: inspect.Signature | None = None
        self._class: type | None = None
        self._raw: object = None

    @classmethod
    def parse(cls, text: str, tap: FunctionTap) -> _Entry:
        module, colon, function = text.partition(":")
        names = function.split(".")
        parts = [*module.split("."), *names]
        if not colon or len(names) > 2 or not all(part.isidentifier() for part in parts):
            raise UsageError(
                f"{text!r} names no function; write module:function, as in torch.nn.functional:linear"
            )
        return cls(text, module, names, tap)

    @property
    def is_method(self) -> bool:
        return len(self.names) == 2

    def find(self, taken: set[int]) -> bool:
        """Take the function if it is there; True if it was not seen before."""
        module = sys.modules.get(self.module)
        if not isinstance(module, types.ModuleType):
            return False
        # Not getattr: a package that makes its names on first use would import what nobody asked for.
        found = object.__getattribute__(module, "__dict__").get(self.names[0])
        if self.is_method:
            return isinstance(found, type) and self._find_method(found)
        if id(found) in taken:
            self.original = found  # another entry has it under another name
        if id(found) in taken or found is None:
            return False
        if isinstance(found, type) or not callable(found):
            self.tap.problems[self.text] = f"it is a {type(found).__name__}, not a function"
            return False
        self._take(found)
        return True

    def _find_method(self, cls: type) -> bool:
        raw = vars(cls).get(self.names[1])
        function = getattr(raw, "__func__", raw)
        if raw is None or not callable(function):
            return False
        self._take(function)
        self._class, self._raw = cls, raw
        wrapped = type(raw)(self.wrapper) if isinstance(raw, (staticmethod, classmethod)) else self.wrapper
        setattr(cls, self.names[1], wrapped)
        return True

    def _take(self, function: Any) -> None:
        self.original = function
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):  # built-ins without one
            self.signature = None
        entry = self

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return entry.tap._call(entry, args, kwargs)

        self.wrapper = wrapper

    def restore_method(self) -> None:
        if self._class is not None:
            setattr(self._class, self.names[1], self._raw)

    def forget(self) -> None:
        self.wrapper = self._class = self._raw = None


def _library(module: str) -> dict[str, object]:
    top = module.partition(".")[0]
    version = vars(sys.modules[top]).get("__version__") if top in sys.modules else None
    return {"library": top, "version": None if version is None else str(version)}
