"""The gate's result as GitHub workflow commands, which become annotations of the pull request.

Escaping as the runner undoes it: ``%``, CR and LF in messages, and also ``:`` and ``,`` in properties.
"""

from __future__ import annotations

from typing import IO

from detaudit.core.gating import Check, GateResult, TargetResult

MOST = 10
"""GitHub shows so many annotations of one kind per step."""
_COMMAND = {"failed": "error", "error": "error", "inconclusive": "warning"}


class GitHubReporter:
    def render(self, result: GateResult, stream: IO[str]) -> None:
        problems = [(t, c) for t in result.targets for c in t.checks if c.status != "passed"]
        for target, check in problems[:MOST]:
            stream.write(_annotation(target, check) + "\n")
        if len(problems) > MOST:
            stream.write(f"::notice title=detaudit::{len(problems) - MOST} more are in the step summary\n")


def _annotation(target: TargetResult, check: Check) -> str:
    title = f"detaudit: {target.name}: {check.name} {check.status}"
    properties = f"file={_property(target.file)},line=1,title={_property(title)}"
    return f"::{_COMMAND[check.status]} {properties}::{_data(check.message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
