"""What a gate is asked to examine: targets of the policy, targets beside it, and traces recorded before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from detaudit.core.errors import TargetNotFound, UsageError
from detaudit.gate.policy import Policy, TargetPolicy
from detaudit.trace import open_trace

SQLITE = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Subject:
    """One target with its policy, and the trace to judge where it need not be recorded first.

    ``path``: the target as the audit gets it; empty for a trace.
    """

    target: TargetPolicy
    path: str = ""
    trace: Path | None = None

    @property
    def file(self) -> str:
        """The target's file relative to the current folder, where CI annotations are placed."""
        path = split(self.path or self.target.path)[0]
        relative = os.path.relpath(path) if self.path else path
        return Path(relative).as_posix()


def subjects(arguments: Sequence[str], policy: Policy, *, optional: bool = False) -> list[Subject]:
    """Those on the command line; without any, all targets of the policy. ``optional``: none is fine, too.

    Raises:
        UsageError: there is nothing to examine, or something twice.
        TargetNotFound: a file does not exist.
        TraceUnreadable: a trace cannot be opened.
    """
    if not arguments and not policy.targets and not optional:
        raise UsageError(
            "there is nothing to examine; name a target or a trace, or list 'targets' in [tool.detaudit]"
        )
    found = list(_given(arguments, policy)) if arguments else [_listed(t, policy) for t in policy.targets]
    names = [subject.target.name for subject in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"'{name}' is to be examined twice; name it once")
    return found


def split(target: str) -> tuple[str, str]:
    """``model.py:NAME`` is the file ``model.py`` and its factory; a file of that very name goes first."""
    if Path(target).exists() or ":" not in target:
        return target, ""
    path, _, factory = target.rpartition(":")
    return path, factory


def _given(arguments: Sequence[str], policy: Policy) -> Iterator[Subject]:
    for argument in arguments:
        if is_trace(Path(argument)):
            yield _trace(Path(argument), policy)
        else:
            yield _target(argument, policy)


def is_trace(path: Path) -> bool:
    if path.suffix == ".detaudit":
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    except OSError:
        return False


def _listed(target: TargetPolicy, policy: Policy) -> Subject:
    file, factory = split(str(policy.folder / target.path))
    if not Path(file).is_file():
        raise TargetNotFound(
            f"{policy.source or 'the policy'} lists the target '{target.path}', and {file} is no file; "
            "correct its path, which is relative to the policy"
        )
    return Subject(target, f"{file}:{factory}" if factory else file)


def _target(argument: str, policy: Policy) -> Subject:
    """A target of the policy by its name, or any file."""
    for target in policy.targets:
        if argument == target.name:
            return _listed(target, policy)
    file, factory = split(argument)
    if not Path(file).is_file():
        raise TargetNotFound(f"no such file: {file}; give a target, a trace, or a name from the policy")
    relative = Path(os.path.relpath(Path(file).resolve(), policy.folder)).as_posix()
    path = f"{relative}:{factory}" if factory else relative
    for target in policy.targets:
        if path == target.path:
            return Subject(target, argument)
    return Subject(replace(policy.defaults, name=path, path=path), argument)


def _trace(path: Path, policy: Policy) -> Subject:
    """A trace knows its target by file name only; the policy's target is the one of that name."""
    with open_trace(path) as trace:
        label = str(trace.meta.get("target") or path.name)
    named = [t for t in policy.targets if label in (t.name, Path(t.path).name)]
    target = named[0] if len(named) == 1 else replace(policy.defaults, name=label, path=label)
    return Subject(target, trace=path)
