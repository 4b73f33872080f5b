"""The first call whose bits changed from one set of calls to another.

The rule is that of an origin: equal arguments, other outputs, and no call inside it of which the same holds.
Calls that vary within one of the two sets are passed over: a race is not a change.
"""

from __future__ import annotations

from collections.abc import Mapping

from detaudit.core.gating import Change, ChangeKind
from detaudit.differ.bits import VARIES, Bits, CallBits, Content, Key


def contents(bits: Bits) -> dict[Key, Content]:
    return {call.key: call.content for call in bits.calls}


def first_change(
    now: Bits, before: Mapping[Key, Content], parameters: Mapping[str, str] | None = None
) -> Change | None:
    """Where ``now`` parts from ``before``; ``None`` if no call does.

    Args:
        parameters: digests by module on the side of ``before``; ``None`` where they are not known.
    """
    differing = [i for i, call in enumerate(now.calls) if _differs(call, before.get(call.key))]
    known = {call.key for call in now.calls}
    lacking = [key for key in before if key not in known]
    if not differing and not lacking:
        return None
    modules = len({now.calls[i].module for i in differing} | {module for module, _ in lacking})
    sources = [i for i in differing if _is_source(now.calls[i], before.get(now.calls[i].key))]
    inner = set(sources) - {above for i in sources for above in _ancestors(now, i)}
    if inner:
        call = now.calls[min(inner)]
        return _change(call, _kind(call, before[call.key], now.parameters, parameters), modules)
    new = [i for i in differing if now.calls[i].key not in before]
    if new:
        return _change(now.calls[new[0]], "calls", modules)
    if not differing:
        module, ordinal = min(lacking)
        return Change(module, "", ordinal, "calls", modules)
    return _change(now.calls[differing[0]], "inputs", modules)


def _change(call: CallBits, kind: ChangeKind, modules: int) -> Change:
    return Change(call.module, call.cls, call.ordinal, kind, modules)


def _kind(
    call: CallBits, before: Content, now: Mapping[str, str], parameters: Mapping[str, str] | None
) -> ChangeKind:
    if parameters is not None and _parameters_differ(call.module, now, parameters):
        return "parameters"
    return "state" if call.content.state != before.state else "outputs"


def _differs(call: CallBits, before: Content | None) -> bool:
    if before is None:
        return True
    return VARIES not in (call.content.out, before.out) and call.content.out != before.out


def _is_source(call: CallBits, before: Content | None) -> bool:
    """Of a call that differs. State that varies within one side is no ground to tell the sides apart."""
    if before is None or VARIES in (call.content.state, before.state):
        return False
    return call.content.args != VARIES and call.content.args == before.args


def _ancestors(bits: Bits, index: int) -> list[int]:
    above = []
    index = bits.calls[index].parent
    while index >= 0:
        above.append(index)
        index = bits.calls[index].parent
    return above


def _parameters_differ(module: str, now: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether the module, or one inside it, has other parameters."""
    prefix = f"{module}." if module else ""
    inside = [path for path in {*now, *before} if path == module or path.startswith(prefix)]
    return any(now.get(path) != before.get(path) for path in inside)
