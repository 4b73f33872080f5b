"""The lock file: the bits of each target's modules, per condition and environment, as reviewed text.

JSON with one line per module, modules in natural order, so that a diff names the modules whose bits changed.
It holds nothing of the machine but what the fingerprint holds: written on another machine with the same
fingerprint it comes out the same. History of the version: 1, first version.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detaudit.core.errors import LockUnreadable
from detaudit.core.files import write_text
from detaudit.differ.bits import VARIES, Bits, CallBits, Content, Key
from detaudit.differ.changes import contents
from detaudit.differ.environment import identity

FORMAT = "detaudit-lock"
VERSION = 1
KEPT_CALLS = 8
"""Calls of a module that are kept one by one; later ones share an entry."""
ADVICE = "restore it from version control, or write it anew with detaudit gate --update"

_DIGEST = "([0-9a-f]{16}|varies)"
_LINE = re.compile(rf"in {_DIGEST} own {_DIGEST} out {_DIGEST}(?: calls (\d+) to last)?")
_HEX = re.compile(r"[0-9a-f]{16}|varies|absent")


@dataclass(frozen=True, slots=True)
class ConditionBits:
    """What the lock keeps of one condition. ``calls``: digests by (module, call).

    Calls from ``KEPT_CALLS`` on are one entry with that ordinal.
    """

    inputs: str
    final: str
    calls: Mapping[Key, Content]


@dataclass(frozen=True, slots=True)
class TargetBits:
    """What the lock keeps of one target in one environment. ``parameters``: by owning module."""

    conditions: Mapping[str, ConditionBits]
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lock:
    """All of the file. ``targets``: by target name, then by environment id.

    ``suspects``: those of a static scan, in the form of ``detaudit.scan.suspects``; None where none was made.
    """

    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    targets: Mapping[str, Mapping[str, TargetBits]] = field(default_factory=dict)
    suspects: Sequence[Mapping[str, Any]] | None = None

    def with_target(self, name: str, entries: Mapping[str, str], bits: TargetBits) -> Lock:
        """With a new baseline for one target in the environment with these fingerprint entries."""
        key = identity(entries)
        targets = {**self.targets, name: {**self.targets.get(name, {}), key: bits}}
        return Lock({**self.environments, key: entries}, targets, self.suspects)

    def with_suspects(self, suspects: Sequence[Mapping[str, Any]]) -> Lock:
        return replace(self, suspects=suspects)

    def kept_to(self, names: Iterable[str]) -> Lock:
        """Without baselines of targets of other names, and without environments that no target uses."""
        targets = {name: self.targets[name] for name in names if name in self.targets}
        used = {key for by_environment in targets.values() for key in by_environment}
        environments = {key: entries for key, entries in self.environments.items() if key in used}
        return Lock(environments, targets, self.suspects)


def target_bits(conditions: Mapping[str, Bits]) -> TargetBits:
    """What is kept of a trace's bits."""
    parameters = next((bits.parameters for bits in conditions.values()), {})
    kept = {name: ConditionBits(b.inputs, b.final, contents(folded(b))) for name, b in conditions.items()}
    return TargetBits(kept, parameters)


def folded(bits: Bits) -> Bits:
    """The same with the calls of a module from ``KEPT_CALLS`` on folded into the first of them."""
    more: dict[str, list[CallBits]] = {}
    for call in bits.calls:
        if call.ordinal >= KEPT_CALLS:
            more.setdefault(call.module, []).append(call)
    place: dict[int, int] = {-1: -1}
    calls: list[CallBits] = []
    for index, call in enumerate(bits.calls):
        parent = place[call.parent]
        if call.ordinal > KEPT_CALLS:
            place[index] = parent
            continue
        place[index] = len(calls)
        content = call.content
        if call.ordinal == KEPT_CALLS:
            content = Content(*map(_fold, zip(*(c.content for c in more[call.module]), strict=True)))
        calls.append(replace(call, parent=parent, content=content))
    return replace(bits, calls=tuple(calls))


def _fold(digests: Iterable[str]) -> str:
    digests = tuple(digests)
    if VARIES in digests:
        return VARIES
    return hashlib.blake2b("\n".join(digests).encode(), digest_size=8).hexdigest()


def read_lock(path: Path) -> Lock:
    """The lock file; an empty lock where there is none.

    Raises:
        LockUnreadable: damaged, edited into something else, or of an unknown version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Lock()
    except OSError as error:
        raise LockUnreadable(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except ValueError as error:
        raise LockUnreadable(f"{path} is not JSON ({error}); {ADVICE}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LockUnreadable(f"{path} is not a detaudit lock file; name the right one in the policy's 'lock'")
    if data.get("version") != VERSION:
        raise LockUnreadable(
            f"{path} has version {data.get('version')!r}, this detaudit reads {VERSION}; "
            "upgrade detaudit, or write the file anew with detaudit gate --update"
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LockUnreadable(f"{path} is damaged ({error}); {ADVICE}") from error


def write_lock(path: Path, lock: Lock) -> None:
    """Write the file whole or not at all.

    Raises:
        TraceNotWritten: it cannot be written; what was there before still is.
    """
    write_text(path, dumps(lock))


def dumps(lock: Lock) -> str:
    """The text of the file: sorted, one line per module."""
    environments = {key: dict(sorted(lock.environments[key].items())) for key in sorted(lock.environments)}
    targets = {
        name: {key: _target(lock.targets[name][key]) for key in sorted(lock.targets[name])}
        for name in sorted(lock.targets)
    }
    body: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    body |= {"environments": environments, "targets": targets}
    if lock.suspects is not None:
        body["suspects"] = list(lock.suspects)
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def _target(bits: TargetBits) -> dict[str, Any]:
    names = sorted(bits.conditions)
    return {
        "conditions": {name: _condition(bits.conditions[name]) for name in names},
        "parameters": {path: bits.parameters[path] for path in sorted(bits.parameters, key=natural)},
    }


def _condition(bits: ConditionBits) -> dict[str, Any]:
    lines: dict[str, list[str]] = {}
    for (module, ordinal), content in sorted(bits.calls.items(), key=lambda item: item[0]):
        later = f" calls {ordinal} to last" if ordinal == KEPT_CALLS else ""
        line = f"in {content.args} own {content.state} out {content.out}{later}"
        lines.setdefault(module, []).append(line)
    paths = sorted(lines, key=natural)
    modules = {path: lines[path] if len(lines[path]) > 1 else lines[path][0] for path in paths}
    return {"inputs": bits.inputs, "final": bits.final, "modules": modules}


def natural(path: str) -> list[tuple[int, int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    parts = path.split(".") if path else []
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _parse(data: Mapping[str, Any]) -> Lock:
    environments = {key: _strings(entries, key) for key, entries in data["environments"].items()}
    for key, entries in environments.items():
        if identity(entries) != key:
            raise ValueError(f"the entries of environment {key} do not belong to that id")
    targets = {
        name: {key: _parse_target(entry) for key, entry in by_environment.items()}
        for name, by_environment in data["targets"].items()
    }
    for name, by_environment in targets.items():
        for key in by_environment:
            if key not in environments:
                raise ValueError(f"target '{name}' names the environment {key}, which is missing")
    suspects = data.get("suspects")
    if suspects is not None and not all(isinstance(suspect, dict) for suspect in suspects):
        raise ValueError("'suspects' is not a list of objects")
    return Lock(environments, targets, suspects)


def _parse_target(entry: Mapping[str, Any]) -> TargetBits:
    conditions = {name: _parse_condition(found) for name, found in entry["conditions"].items()}
    parameters = {path: _digest(value) for path, value in entry["parameters"].items()}
    return TargetBits(conditions, parameters)


def _parse_condition(entry: Mapping[str, Any]) -> ConditionBits:
    calls: dict[Key, Content] = {}
    for module, lines in entry["modules"].items():
        for ordinal, text in enumerate([lines] if isinstance(lines, str) else lines):
            found = _LINE.fullmatch(text)
            if found is None:
                raise ValueError(f"module '{module}' has the line {text!r}")
            calls[module, int(found[4] or ordinal)] = Content(found[1], found[2], found[3])
    return ConditionBits(_digest(entry["inputs"]), _digest(entry["final"]), calls)


def _digest(text: str) -> str:
    if not _HEX.fullmatch(text):
        raise ValueError(f"{text!r} is not a digest")
    return text


def _strings(entries: Mapping[str, Any], key: str) -> dict[str, str]:
    if not all(isinstance(value, str) for value in entries.values()):
        raise ValueError(f"environment {key} holds something other than text")
    return dict(entries)
