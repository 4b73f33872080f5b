"""CUDA graphs of the target: which calls a graph holds, and one more of each at every replay.

A replay runs no Python, so nothing can watch its calls as they are made. They are watched when the graph is
captured: digests become part of the graph, and each replay leaves them in slots that are the graph's own. All
ways to graphs go through ``torch.cuda.CUDAGraph`` (``torch.cuda.graph``, ``make_graphed_callables``,
torch.compile's ``reduce-overhead``), whose methods are wrapped here.

A capture is left as it is otherwise: nothing waits for the device, generator states are not read, and memory
is taken only for digests beyond the reserve, or of tensors whose rows are not contiguous, from the graph's
own pool.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn

from detaudit.core.digest import Digester, Pending, make_digester
from detaudit.core.errors import UsageError
from detaudit.hooks.calls import Entry, watch
from detaudit.hooks.capture import Captures
from detaudit.hooks.frames import Frame
from detaudit.hooks.graph_template import Template
from detaudit.hooks.names import Names
from detaudit.hooks.run import RecordedRun
from detaudit.hooks.witness import Witness

LARGE_BYTES = 64 << 20
UNWATCHED = "calls in a CUDA graph that was captured while nothing was recorded"
ON_HOST = "calls in a CUDA graph: digests are computed on the host here, which a graph cannot hold"
ELSEWHERE = "calls in a CUDA graph that was captured while another was"


class Slots(Protocol):
    """The digests of one captured graph (``GraphSlots``)."""

    def before_replay(self) -> None:
        """A replay is about to be queued on the current stream, whether or not its digests are wanted."""
        ...

    def replayed(self) -> Sequence[Pending]:
        """Keep the digests of the replay that was just queued on the current stream."""
        ...


class GraphDigester(Digester, Protocol):
    """A digester whose digests can be part of a graph (``DeviceDigester``)."""

    def prepare_capture(self) -> None:
        """Take what cannot be taken during a capture on the current device."""
        ...

    def take_capture(self) -> Slots | None:
        """What this thread submitted under capture since the last call."""
        ...


class CaptureRun(RecordedRun):
    """Listens to the calls made while a graph is captured; they belong to no run before it is replayed.

    Args:
        like: the run in progress, of which names and choices are taken; None while a model is built.
    """

    def __init__(self, digester: Digester, like: RecordedRun | None) -> None:
        names = Names() if like is None else like.names
        large_bytes = LARGE_BYTES if like is None else like.witness.large_bytes
        witness = Witness(digester, large_bytes, reads_generators=False)
        super().__init__(names, witness, _all if like is None else like.wants, Captures((), 0), {})
        self.wrappers = like.wrappers if like else None
        self._template = Template(self._top, self._outermost)

    def open(
        self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        frame = super().open(module, entry, args, kwargs)
        if frame is not None:
            self._template.modules[id(frame)] = weakref.ref(module)
        return frame

    def finished(self) -> Template:
        """The capture is over: its calls."""
        self.over = True
        self._template.notes.extend(reason for _, _, reason in self._notes)
        self._template.settle()
        return self._template

    def _is_capturing(self) -> bool:
        return False  # for all that matters here: digests may go into this graph

    def _close_up(self, module: nn.Module | None, reason: str) -> None:
        super()._close_up(module, reason)
        if module is not None:
            self._template.closed.append((weakref.ref(module), reason))


def _all(_: str) -> bool:
    return True


@dataclass(slots=True)
class _Capture:
    """A capture in progress: who listens, and what ends with it."""

    run: CaptureRun
    digester: GraphDigester
    watching: contextlib.ExitStack


class GraphWatcher:
    """Knows the calls in the target's CUDA graphs, and tells the run in progress of every replay.

    One watcher lives as long as the target's graphs may: a graph that was captured while the model was built,
    or in an earlier run, is replayed in later ones. Graphs are referred to weakly.

    Args:
        digester: that of the runs; made when the first graph is captured where there is none before.
    """

    def __init__(self, digester: Digester | None = None) -> None:
        self.digester = digester
        self._run: RecordedRun | None = None
        self._building = False
        self._armed = False
        self._captures: dict[int, _Capture] = {}
        self._graphs: weakref.WeakKeyDictionary[Any, tuple[Template, Slots | None] | str]
        self._graphs = weakref.WeakKeyDictionary()
        self._unrecorded = 0

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Graphs are watched inside."""
        if self._armed:
            yield
            return
        cls: Any = torch.cuda.CUDAGraph
        handlers = {
            "capture_begin": self._begin,
            "capture_end": self._end,
            "replay": self._replay,
            "reset": self._reset,
        }
        originals = {name: (name in vars(cls), getattr(cls, name)) for name in handlers}
        for name, handler in handlers.items():
            setattr(cls, name, _handled(originals[name][1], handler))
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            for name, (own, original) in originals.items():
                setattr(cls, name, original) if own else delattr(cls, name)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """The target builds its model inside: calls in the graphs that it captures are noted."""
        self._building = True
        try:
            with self.armed():
                yield
        finally:
            self._building = False

    @contextlib.contextmanager
    def recording(self, run: RecordedRun) -> Iterator[None]:
        """``run`` is in progress inside."""
        self._run = run
        try:
            with self.armed():
                yield
        finally:
            self._run = None

    def capture(self) -> CaptureRun | None:
        """Who listens to calls that go into a graph now: of this thread, on the current stream."""
        if not self._captures:
            return None
        capture = self._captures.get(threading.get_ident())
        return capture.run if capture is not None and _capturing() else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the report should know about graphs."""
        if not self._unrecorded:
            return ()
        return (
            "CUDA graphs that were captured under observation keep computing digests when they are replayed "
            f"in runs without recording ({self._unrecorded} replays): in those, hooks are not fully off",
        )

    def _begin(self, graph: Any, begin: Callable[[], None]) -> None:
        self._graphs.pop(graph, None)
        capture = self._prepared() if self._run is not None or self._building else UNWATCHED
        try:
            begin()
        except BaseException:
            if isinstance(capture, _Capture):
                capture.watching.close()
            raise
        if isinstance(capture, _Capture):
            self._captures[threading.get_ident()] = capture
        else:
            self._graphs[graph] = capture

    def _prepared(self) -> _Capture | str:
        """What listens to a capture that is about to begin, or why nothing does."""
        run, watching = self._run, contextlib.ExitStack()
        try:
            digester = self._graph_digester()
            if digester is None:
                return ON_HOST
            digester.prepare_capture()
            digester.take_capture()  # of a capture that came to no end
            if run is None:
                watching.enter_context(watch(_Forwarding(self)))
        except UsageError:
            return ELSEWHERE
        except Exception as error:  # the target's capture goes on, seen or not
            return f"calls in a CUDA graph ({_line(error)})"
        return _Capture(CaptureRun(digester, run), digester, watching)

    def _graph_digester(self) -> GraphDigester | None:
        if self.digester is None:
            self.digester = make_digester(torch.device("cuda", torch.cuda.current_device()))
        known = hasattr(self.digester, "take_capture")
        return cast(GraphDigester, self.digester) if known else None

    def _end(self, graph: Any, end: Callable[[], None]) -> None:
        capture = self._captures.pop(threading.get_ident(), None)
        if capture is None:
            end()
            return
        try:
            end()
        finally:
            capture.watching.close()
            slots, template = capture.digester.take_capture(), capture.run.finished()
        self._graphs[graph] = template, slots

    def _replay(self, graph: Any, replay: Callable[[], None]) -> None:
        run, known = self._run, self._graphs.get(graph, UNWATCHED)
        if _capturing():
            known = "calls in a CUDA graph that became part of another"
        if isinstance(known, str):
            replay()
            if run is not None:
                run.note(known)
            return
        template, slots = known
        if slots is not None:
            slots.before_replay()
        if run is None:
            replay()
            self._unrecorded += slots is not None
            return
        rng = run.generators()
        replay()
        try:
            digests = slots.replayed() if slots is not None else ()
        except Exception as error:  # no room for them, for one
            run.note(f"calls in a CUDA graph ({_line(error)})")
        else:
            run.replayed(template, digests, rng)

    def _reset(self, graph: Any, reset: Callable[[], None]) -> None:
        self._graphs.pop(graph, None)
        reset()


class _Forwarding:
    """The listener while no run is in progress: calls that go into a graph, and no others."""

    def __init__(self, graphs: GraphWatcher) -> None:
        self._graphs = graphs

    def open(
        self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        capture = self._graphs.capture()
        return None if capture is None else capture.open(module, entry, args, kwargs)

    def close(self, frame: Frame, output: Any) -> Any:
        assert isinstance(frame.listener, CaptureRun)
        return frame.listener.close(frame, output)

    def fail(self, frame: Frame, error: BaseException) -> None:
        assert isinstance(frame.listener, CaptureRun)
        frame.listener.fail(frame, error)


def _handled(original: Callable[..., None], handler: Callable[[Any, Callable[[], None]], None]) -> Any:
    @functools.wraps(original)
    def method(graph: Any, *args: Any, **kwargs: Any) -> None:
        handler(graph, functools.partial(original, graph, *args, **kwargs))

    return method


def _capturing() -> bool:
    return bool(cast(Any, torch.cuda).is_current_stream_capturing())


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
