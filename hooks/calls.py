"""Being told of every module call: wrappers around ``nn.Module.__call__`` and around classes' ``forward``.

Per-module hooks would switch off nn.TransformerEncoderLayer's fast path, global pre-hooks get no kwargs, and
hooks lose the balance of calls when a parent catches a child's exception. So there is one wrapper around
``nn.Module.__call__``, and one around each class's own ``forward`` (and ``__call__``) for children that are
called as ``child.forward(x)``. All wrappers are on classes: one on an instance would survive a deepcopy and
run the original. All are gone when ``watch`` ends.

torch.compile never sees them: it inlines ``_torchdynamo_inline`` instead of a wrapper, the wrapper's own
frame is on its skip list, and what the wrapper calls runs with compilation disabled. So nothing is compiled
anew, and no graph breaks. TorchScript reads a method's source and globals; while it compiles, the wrappers
are lifted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch._dynamo.eval_frame
import torch.jit._recursive
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from detaudit.core.errors import UsageError

Kind = Literal["call", "forward"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A wrapped method: ``__call__`` or ``forward`` as defined by the class ``owner``."""

    kind: Kind
    owner: type

    def continues(self, other: Entry, cls: type) -> bool:
        """Whether entering here is a step of the call that entered at ``other``, not a call of its own.

        ``__call__`` leads to ``forward``, and either may lead to that of a base class through ``super()``.
        """
        if self.kind != other.kind:
            return other.kind == "call"
        mro = cls.__mro__
        return other.owner in mro and self.owner in mro and mro.index(self.owner) > mro.index(other.owner)


class Listener(Protocol):
    """Is told of every call; ``open`` returns None for a call that it does not want to hear more of."""

    def open(
        self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any | None: ...

    def close(self, frame: Any, output: Any) -> Any:
        """The call returned ``output``; what this returns, the caller gets."""
        ...

    def fail(self, frame: Any, error: BaseException) -> None: ...


class _Switchboard:
    """Where the wrappers find their listener; wrappers that outlive a run (bound methods kept) find None."""

    listener: Listener | None = None
    hidden: Listener | None = None
    """The listener where torch.compile might see it, which costs more."""


_BOARD = _Switchboard()
_LOCK = threading.Lock()


@contextlib.contextmanager
def watch(listener: Listener, classes: Iterable[type] = ()) -> Iterator[Wrappers]:
    """Tell ``listener`` of every call made inside, in any thread.

    Args:
        classes: module classes to begin with; those of modules called later are added by ``Wrappers.add``.

    Raises:
        UsageError: something is being recorded in this process already.
    """
    if not _LOCK.acquire(blocking=False):
        raise UsageError("a recording is in progress in this process; end it before you start another")
    wrappers = Wrappers()
    try:
        _BOARD.listener, _BOARD.hidden = listener, _Uncompiled(listener)
        wrappers.install(classes)
        yield wrappers
    finally:
        wrappers.remove()
        _BOARD.listener = _BOARD.hidden = None
        _LOCK.release()


class _Uncompiled:
    """The listener, out of torch.compile's sight: the code after a graph break runs under its frame hook."""

    def __init__(self, listener: Listener) -> None:
        disable: Any = torch._dynamo.disable
        self.open = disable(listener.open)
        self.close = disable(listener.close)
        self.fail = disable(listener.fail)


_frame_hook: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: Ellipsis
)
"""torch.compile's frame hook in this thread: None where there is none, and so nothing to hide from."""


class Wrappers:
    """The wrappers that are on classes now, each with the original it stands for."""

    def __init__(self) -> None:
        self._originals: dict[tuple[type, str], Any] = {}
        self._seen: set[type] = set()
        self._create_script_module = torch.jit._recursive.create_script_module

    def install(self, classes: Iterable[type]) -> None:
        self._wrap(nn.Module, "__call__", "call")
        self.add(_subclasses(nn.Module))
        self.add(classes)
        torch.jit._recursive.create_script_module = self._lifted(self._create_script_module)

    def remove(self) -> None:
        torch.jit._recursive.create_script_module = self._create_script_module
        for (cls, name), original in reversed(self._originals.items()):
            # A method that the target replaced meanwhile is the target's business.
            if getattr(cls.__dict__.get(name), "__wrapped__", None) is original:
                setattr(cls, name, original)
        self._originals.clear()
        self._seen.clear()

    def __contains__(self, cls: type) -> bool:
        return cls in self._seen

    def add(self, classes: Iterable[type]) -> None:
        """Wrap the methods of module classes that are not wrapped yet, those of their bases included."""
        for cls in classes:
            if cls not in self._seen:
                self._seen.update(cls.__mro__)
                for base in cls.__mro__:
                    if base is not nn.Module and base is not object:
                        self._wrap(base, "forward", "forward")
                        self._wrap(base, "__call__", "call")

    def _wrap(self, cls: type, name: str, kind: Kind) -> None:
        original = cls.__dict__.get(name)
        if (cls, name) in self._originals or not inspect.isfunction(original):
            return
        self._originals[cls, name] = original
        setattr(cls, name, _watched(original, Entry(kind, cls)))

    def _lifted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def lifted(*args: Any, **kwargs: Any) -> Any:
            wrapped = {key: key[0].__dict__[key[1]] for key in self._originals}
            for (cls, name), original in self._originals.items():
                setattr(cls, name, original)
            try:
                return function(*args, **kwargs)
            finally:
                for (cls, name), wrapper in wrapped.items():
                    setattr(cls, name, wrapper)

        return lifted


def _subclasses(cls: type) -> Iterator[type]:
    sub: type
    for sub in type.__subclasses__(cls):
        if not issubclass(sub, torch.jit.ScriptModule):
            yield sub
            yield from _subclasses(sub)


def _watched(original: Callable[..., Any], entry: Entry) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        listener = _BOARD.listener if _frame_hook() is None else _BOARD.hidden
        frame = None if listener is None else listener.open(self, entry, args, kwargs)
        if listener is None or frame is None:
            return original(self, *args, **kwargs)
        try:
            output = original(self, *args, **kwargs)
        except BaseException as error:
            listener.fail(frame, error)
            raise
        return listener.close(frame, output)

    watched._torchdynamo_inline = getattr(original, "_torchdynamo_inline", original)  # type: ignore[attr-defined]
    return watched


# All wrappers share one code object, so that one entry in torch.compile's skip list covers them.
torch._dynamo.eval_frame.skip_code(_watched(lambda self: None, Entry("forward", object)).__code__)


def is_symbolic() -> bool:
    """Whether modules are traced instead of run: compiling, exporting, jit or fx tracing, fake tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or is_fx_symbolic_tracing()
        or (torch._C._len_torch_dispatch_stack() > 0 and _fake_or_proxy())
    )


def _fake_or_proxy() -> bool:
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))
