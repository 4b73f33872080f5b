"""One run while it is recorded: which calls are open in each thread, and where each belongs."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from detaudit.core.digest import Pending, interposed, unseen
from detaudit.core.recording import Call, CallKey, Record
from detaudit.hooks.calls import Entry, Wrappers, is_symbolic
from detaudit.hooks.capture import CapturedCall, Captures, copy_of
from detaudit.hooks.frames import Built, Frame, build, expand, final_record
from detaudit.hooks.graph_template import Placed, Replay, Template
from detaudit.hooks.names import Names, Place, inner_of
from detaudit.hooks.observe import PendingRecord
from detaudit.hooks.own_state import is_closed
from detaudit.hooks.witness import Witness


@dataclass(slots=True)
class Recording:
    """What a run left behind; filled when the ``run`` block ends, also when it ends with an exception.

    Args:
        calls: in execution order, a parent before its children.
        unobserved: (module path, site, reason), each once.
        final: the outputs of the outermost calls: ``out...``, or ``PATH.out...`` for a module other than the
            root, or ``PATH.call[n].out...`` where a module was called more than once.
        captured: one entry for each call asked for, with the reason where there is nothing.
        renamed: paths given while it ran that differ in ``calls`` (several outermost modules).
    """

    calls: list[Call] = field(default_factory=list)
    unobserved: tuple[tuple[str, str, str], ...] = ()
    final: Record = ()
    captured: dict[CallKey, CapturedCall] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)


_FOREIGN: weakref.WeakSet[threading.Thread] | None = None


def note_foreign_threads() -> None:
    """Remember, once in a process, the threads that are there before anything is recorded."""
    global _FOREIGN
    if _FOREIGN is None:
        _FOREIGN = weakref.WeakSet(threading.enumerate())


class _Thread(threading.local):
    """The calls open in this thread, outermost first; None for a thread whose calls are not recorded."""

    def __init__(self, owner: threading.Thread, owners_stack: list[Frame]) -> None:
        current = threading.current_thread()
        self.is_worker = current is not owner
        self.stack: list[Frame] | None = [] if self.is_worker else owners_stack
        if self.is_worker and _FOREIGN is not None and current in _FOREIGN:
            self.stack = None


class RecordedRun:
    """Listens to the calls of one run. The thread that makes it is the run's own, all others are workers.

    Args:
        names: of the attached modules; modules met in the run are added.
        witness: observes what calls are handed and return.
        wants: whether calls of a module path are recorded.
        substitutes: outputs that replace those of the calls they are filed under.
        capture: gives who listens to the calls made into a CUDA graph that this thread is capturing now.
    """

    def __init__(
        self,
        names: Names,
        witness: Witness,
        wants: Callable[[str], bool],
        captures: Captures,
        substitutes: Mapping[CallKey, Any],
        capture: Callable[[], RecordedRun | None] = lambda: None,
    ) -> None:
        self.names = names
        self.over = False
        self.wrappers: Wrappers | None = None
        self.wants = wants
        self._captures = captures
        self._substitutes = substitutes
        self.witness = witness
        self._lock = threading.RLock()
        self._main: list[Frame] = []
        self._thread = _Thread(threading.current_thread(), self._main)
        self._capture = capture
        self._placed: dict[int, tuple[Template, Placed]] = {}
        self._top: list[Frame] = []
        self._outermost: list[Frame] = []
        self._ordinals: Counter[str] = Counter()
        self._closed: dict[Place, tuple[str, list[Place]]] = {}
        self._notes: dict[tuple[str, str, str], None] = {}

    def open(
        self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Frame | None:
        """A call begins. None: it is a step of the innermost open call, or none of ours."""
        stack = self._thread.stack
        if self.over or stack is None or not isinstance(module, nn.Module) or is_symbolic():
            return None
        if stack and _leads_on(stack[-1], module, entry):
            return None
        if stack and stack[-1].inside_closed and self.names.known(module) is None:
            return None  # made by a compiler, such as the graph modules it runs
        if (capture := self._capture()) is not None:
            return capture.open(module, entry, args, kwargs)
        if self._is_capturing():
            return None
        with self._lock, _out_of_sight():
            frame = self._begin(module, entry, args, kwargs)
            self._seat(frame, stack)
            if frame.recorded:
                self._enter(frame)
        if self._captures.wanted and self._is_to_be_captured(frame):
            with (
                self._lock
            ):  # and with modes on: tensors of some classes are copied by their own dispatch only
                frame.captured = self._captures.inputs(args, kwargs)
        stack.append(frame)
        return frame

    def close(self, frame: Frame, output: Any) -> Any:
        """The call returned. Returns what its caller gets: ``output``, or the substitute for it."""
        if frame.listener is not self and isinstance(frame.listener, RecordedRun):
            return frame.listener.close(frame, output)
        self._pop(frame)
        if self._is_capturing():
            _cut_short(frame)
        elif not self.over and (frame.recorded or frame.outermost):
            with self._lock:
                output = self._substituted(frame, output)
                if frame.captured is not None:
                    self._captures.output(frame.captured, output)
                with _out_of_sight():
                    self.witness.leave(frame, output)
        frame.release()
        return output

    def fail(self, frame: Frame, error: BaseException) -> None:
        """The call raised; what it changed in place before that is still told."""
        if frame.listener is not self and isinstance(frame.listener, RecordedRun):
            return frame.listener.fail(frame, error)
        self._pop(frame)
        frame.error = type(error).__name__
        if self._is_capturing():
            _cut_short(frame)
        elif not self.over and frame.recorded and isinstance(error, Exception):
            with self._lock, _out_of_sight():
                self.witness.look_again(frame)
        frame.release()

    def current_call(self) -> CallKey | None:
        """(module path, ordinal) of the innermost recorded call open in this thread."""
        stack = self._thread.stack or self._main
        home = stack[-1].home if stack else None
        return None if home is None else (self.names.live_name(home.place), home.live_ordinal)

    def generators(self) -> PendingRecord:
        """Generator states now."""
        with self._lock, _out_of_sight():
            return self.witness.generators()

    def replayed(self, template: Template, digests: Sequence[Pending], rng: PendingRecord) -> None:
        """A CUDA graph was replayed in this thread: its calls are made here once more.

        Args:
            digests: of this replay, by place in the graph's slots.
            rng: generator states when the replay began.
        """
        stack = self._thread.stack
        if self.over or stack is None:
            return
        with self._lock, _out_of_sight():
            placed = self._placed_in_this_run(template)
            around = stack[-1] if stack else None
            home = around.home if around is not None else None
            calls = placed.below(home)
            known = calls or placed.outermost
            if known:
                replay = Replay(placed, calls, digests, rng)
                self._seat(Frame(known[0].place, "graph", recorded=bool(calls), deferred=replay), stack)
                self._ordinals.update(placed.counts(calls))

    def note(self, reason: str) -> None:
        """Something was not observed, of the innermost call open in this thread."""
        call = self.current_call()
        with self._lock:
            self._notes["" if call is None else call[0], "", reason] = None

    def fill(self, recording: Recording) -> None:
        """Turn what was seen into the recording; after the digester's ``finish()``."""
        expand(self._top, self._outermost)
        built = build(self._top, self._outermost, self.names.attached)
        recording.calls = built.calls
        recording.final = final_record(self._outermost, built.alone)
        recording.captured = self._captured(built)
        recording.unobserved = self._unobserved(built)
        for frame in built.frames:
            live, name = self.names.live_name(frame.place), frame.place.name(built.alone)
            if live != name:
                recording.renamed[live] = name

    def _is_capturing(self) -> bool:
        """Whether digests would break a CUDA graph under construction, or go into it for nothing."""
        cuda: Any = torch.cuda  # without annotations
        capturing = cuda.is_initialized() and cuda.is_current_stream_capturing()
        if capturing:
            self._notes["", "", "calls made while a CUDA graph was captured"] = None
        return bool(capturing)

    def _placed_in_this_run(self, template: Template) -> Placed:
        known = self._placed.get(id(template))
        if known is None:
            known = self._placed[id(template)] = template, template.placed(self.names, self.wants)
            self._notes.update(dict.fromkeys(("", "", reason) for reason in known[1].notes))
            for module, reason in template.closed:
                self._close_up(module(), reason)
        return known[1]

    def _begin(self, module: nn.Module, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame:
        if self.wrappers is not None and type(module) not in self.wrappers:
            self.wrappers.add({type(member) for member in module.modules()})
        place = self.names.find(module)
        if place.wanted is None:
            place.wanted = self.wants(self.names.live_name(place))
        return Frame(
            place,
            entry.kind,
            place.wanted,
            listener=self,
            module=module,
            entry=entry,
            args=args,
            kwargs=kwargs,
        )

    def _seat(self, frame: Frame, stack: list[Frame]) -> None:
        """Give the frame its place in the tree of calls."""
        frame.worker = self._thread.is_worker and not stack
        around = stack[-1] if stack else self._main[-1] if frame.worker and self._main else None
        home = None if around is None else around.home
        frame.home = frame if frame.recorded else home
        frame.inside_closed = around is not None and around.inside_closed
        siblings = self._top if home is None else home.children
        if frame.worker:
            frame.slot = sum(not sibling.worker for sibling in siblings)
        if frame.recorded:
            siblings.append(frame)
        if around is None:
            frame.outermost = True
            self._outermost.append(frame)

    def _enter(self, frame: Frame) -> None:
        place, module = frame.place, frame.module
        assert module is not None
        live_name = self.names.live_name(place)
        frame.live_ordinal = self._ordinals[live_name]
        self._ordinals[live_name] += 1
        closed = is_closed(module)
        if closed and place not in self._closed and not frame.inside_closed:
            kind = "TorchScript" if isinstance(module, torch.jit.ScriptModule) else "compiled"
            self._close_up(module, f"it runs inside a {kind} module")
        frame.inside_closed = frame.inside_closed or closed
        self.witness.enter(frame, closed)

    def _close_up(self, module: nn.Module | None, reason: str) -> None:
        """What happens inside the module is not seen."""
        if module is not None:
            place = self.names.find(module)
            inside = [member for member in self.names.members(module) if member is not place]
            self._closed[place] = (reason, inside)

    def _is_to_be_captured(self, frame: Frame) -> bool:
        # Not final yet where threads interleave, or where modules get their names only in the end.
        unsure = self._thread.is_worker or frame.place.tree.prefix is None
        ordinal = None if unsure else frame.live_ordinal
        return frame.recorded and any(
            self._captures.wants(name, ordinal) for name in self.names.live_names(frame.place)
        )

    def _substituted(self, frame: Frame, output: Any) -> Any:
        if self._substitutes and frame.recorded:
            for name in self.names.live_names(frame.place):
                if (name, frame.live_ordinal) in self._substitutes:
                    return copy_of(self._substitutes[name, frame.live_ordinal])
        return output

    def _pop(self, frame: Frame) -> None:
        stack = self._thread.stack
        while stack and stack.pop() is not frame:
            pass

    def _captured(self, built: Built) -> dict[CallKey, CapturedCall]:
        found: dict[CallKey, CapturedCall] = {}
        if not self._captures.wanted:
            return found
        in_graph = CapturedCall(reason="it was made by a CUDA graph, in which nothing can be copied")
        for frame, call in zip(built.frames, built.calls, strict=True):
            kept = in_graph if call.via == "graph" else frame.captured
            if kept is not None:
                names = {call.module, *self.names.live_names(frame.place)}
                keys = self._captures.wanted & {(name, call.ordinal) for name in names}
                found.update(dict.fromkeys(keys, kept))
        for key in self._captures.wanted - found.keys():
            found[key] = CapturedCall(reason="it was not called in this run")
        return found

    def _unobserved(self, built: Built) -> tuple[tuple[str, str, str], ...]:
        called = {frame.place for frame in built.frames}
        inside = {
            (member.name(built.alone), "", reason)
            for reason, members in self._closed.values()
            for member in members
            if member not in called
        }
        return tuple(sorted({*built.unobserved, *inside, *self._notes}))


_AS_IS = contextlib.nullcontext()


def _out_of_sight() -> contextlib.AbstractContextManager[None]:
    """``unseen``, which takes its time, where a mode or autograd would see what is done to plain tensors."""
    return unseen() if interposed() or torch.is_grad_enabled() else _AS_IS


def _cut_short(frame: Frame) -> None:
    """The call ends inside the capture of a graph that began inside the call."""
    reason = "the call ended while a CUDA graph was captured, which began within it"
    frame.out = PendingRecord([], [("out", reason)])


def _leads_on(top: Frame, module: nn.Module, entry: Entry) -> bool:
    """Whether entering here is a step of the innermost open call; remembers how far that call has come."""
    if top.module is None or top.entry is None:
        return False
    if top.module is module:
        if not entry.continues(top.entry, type(module)):
            return False
        if entry.kind != top.entry.kind:
            top.entry = entry
        return True
    if inner_of(top.module) is not module or top.children:
        return False
    top.module, top.entry = module, entry
    return True
