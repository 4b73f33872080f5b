"""Every error detaudit raises on purpose, and the exit code of each.

``DetauditError`` is the root. A subclass carries a ``slug``: the heading of its entry in docs/messages.md
(cause and fix), and the ``exit_code`` the command line ends with. Messages are one line that says what is
wrong and what to do.

Exit codes: 0 stable; 1 nondeterminism found; 2 could not audit; 3 inconclusive; 70 a fault of detaudit's
own; 130 interrupted; 141 closed pipe.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_STABLE = 0
EXIT_NONDETERMINISTIC = 1
EXIT_ERROR = 2
EXIT_INCONCLUSIVE = 3
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_CLOSED_PIPE = 141


class DetauditError(Exception):
    """Root of all errors raised on purpose; ``str(error)`` is one line for the user."""

    slug: ClassVar[str] = "error"
    exit_code: ClassVar[int] = EXIT_ERROR


class UsageError(DetauditError):
    """The command line or the API was called with something that cannot be meant."""

    slug = "usage"


class TargetNotFound(DetauditError):
    """The target file, or the factory named behind the colon, does not exist."""

    slug = "target-not-found"


class TargetInvalid(DetauditError):
    """The target does not parse, lacks ``make_inputs``, or returns something that cannot be called."""

    slug = "target-invalid"


class TargetRaised(DetauditError):
    """The target's own code raised. ``frames`` is its traceback, trimmed to the user's files."""

    slug = "target-raised"

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class TraceUnreadable(DetauditError):
    """The file is not a trace, is truncated, or is damaged."""

    slug = "trace-unreadable"


class TraceVersion(DetauditError):
    """The trace was written by a version of the format that this detaudit does not know."""

    slug = "trace-version"


class TraceNotWritten(DetauditError):
    """A trace or an output file could not be written (disk full, no permission, exists already)."""

    slug = "not-written"


class CaseUnreadable(DetauditError):
    """A saved kernel case is missing, damaged, or of an unknown version."""

    slug = "case-unreadable"


class NoCase(DetauditError):
    """Nothing was captured that the asked finding could be reproduced from."""

    slug = "no-case"


class NotReproduced(DetauditError):
    """The captured call, run alone, did not show the difference, or could not."""

    slug = "not-reproduced"
    exit_code = EXIT_INCONCLUSIVE


class Unsupported(DetauditError):
    """What was asked cannot run on this machine; the message says what could run it."""

    slug = "unsupported"
    exit_code = EXIT_INCONCLUSIVE


class InternalFault(DetauditError):
    """A fault of detaudit's own: whatever was raised and nobody expected."""

    slug = "internal"
    exit_code = EXIT_INTERNAL


class PolicyInvalid(DetauditError):
    """The policy is missing or cannot be meant: an unknown key, a wrong type, an expired allowance."""

    slug = "policy-invalid"


class LockUnreadable(DetauditError):
    """The lock file is damaged, was edited by hand, or is of an unknown version."""

    slug = "lock-unreadable"
