"""The command line: commands are imported when they run; exit codes are decided here and nowhere else.

A command is a ``click.Command`` named ``command`` in ``detaudit/commands/<name>.py``. Its callback returns
the exit code (``None`` is 0) and raises a ``DetauditError`` for what it cannot do. Whatever else leaves a
command is turned into a code by ``_explain``, because click and Python end with 1 on several occasions
(a crash, a closed pipe, Ctrl-C) that would read as "nondeterministic".
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import select
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NoReturn

import click
from click.shell_completion import CompletionItem, shell_complete

from detaudit import __version__
from detaudit.core import errors
from detaudit.core.errors import DetauditError

COMMANDS: Mapping[str, str] = {
    "run": "Run a target repeatedly and find the module that is the first to differ.",
    "report": "Show the analysis stored in a trace.",
    "kernels": "Rerun one kernel under variants and find a bit-stable setting.",
    "scan": "Read from the machine code which kernels can differ.",
    "gate": "Pass or fail a CI job on evidence.",
    "compare": "Find the first module whose bits differ between two traces.",
    "repro": "Write a folder that reproduces a finding without detaudit.",
    "doctor": "Show what this machine can audit, and what changes its numerics.",
}
"""Every command with its line in ``detaudit --help``; one whose module does not exist is not listed."""

_COMPLETE = "_DETAUDIT_COMPLETE"


@dataclass(slots=True)
class Settings:
    """What holds for the whole command line; ``obj`` of the click context."""

    traceback: bool = False


class LazyGroup(click.Group):
    """Lists its commands from ``COMMANDS`` and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"detaudit.commands.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"detaudit.commands.{cmd_name}").command
        if not any("--traceback" in option.opts for option in command.params):
            command.params.append(_traceback_option())
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in names]


def _traceback_option() -> click.Option:
    def remember(ctx: click.Context, _option: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Settings).traceback = True

    return click.Option(
        ["--traceback"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Show the Python traceback of an error.",
    )


@click.group(
    cls=LazyGroup,
    params=[_traceback_option()],
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 stable, 1 nondeterminism found, 2 could not audit, 3 inconclusive.",
)
@click.version_option(__version__, prog_name="detaudit", message="%(prog)s %(version)s")
def group() -> None:
    """Find out whether a PyTorch model gives the same bits twice, which module is the first to
    differ, and which kernel setting is bit-stable.

    \b
    Example:
      detaudit run model.py
      detaudit report model.detaudit --format markdown
    """


def main() -> NoReturn:
    """Entry point of the ``detaudit`` program."""
    _prepare_streams()
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:]))


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as when a CI job is cancelled: ends like Ctrl-C, so that nothing is left behind."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; every exception becomes a code and one line."""
    settings = Settings()
    try:
        code = _invoke(list(argv), settings)
    except BaseException as error:  # SystemExit too: a target that calls sys.exit(0) is not "stable"
        code = _explain(error, settings)
    return _flush(code)


def _invoke(argv: list[str], settings: Settings) -> int:
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        return shell_complete(group, {}, "detaudit", _COMPLETE, instruction)
    if not argv:
        with group.make_context("detaudit", [], resilient_parsing=True) as ctx:
            _write(group.get_help(ctx))
        return errors.EXIT_ERROR
    # Not click's main(): it ends with 1 on a closed pipe, even outside its standalone mode.
    try:
        with group.make_context("detaudit", argv, obj=settings) as ctx:
            return int(group.invoke(ctx) or 0)
    except click.exceptions.Exit as done:
        return done.exit_code


def _explain(error: BaseException, settings: Settings) -> int:
    """Say in one line what went wrong, and return the exit code for it."""
    if isinstance(error, BrokenPipeError) and (_reader_gone(sys.stdout) or _reader_gone(sys.stderr)):
        return errors.EXIT_CLOSED_PIPE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _say("interrupted")
        return errors.EXIT_TERMINATED if isinstance(error, _Terminated) else errors.EXIT_INTERRUPTED
    if settings.traceback:
        _write("".join(traceback.format_exception(error)))
    known = error if isinstance(error, DetauditError) else _as_known(error)
    _write(getattr(known, "frames", ""))
    _say(str(known), known.slug)
    return known.exit_code


def _as_known(error: BaseException) -> DetauditError:
    if isinstance(error, click.ClickException):
        return errors.UsageError(_usage_line(error))
    if isinstance(error, SystemExit):
        return errors.TargetRaised(
            f"the target ended the process itself (sys.exit({error.code!r})); remove the call"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        name = error.filename or "the output"
        return errors.TraceNotWritten(f"cannot write {name}: {error.strerror}; free some space")
    return errors.InternalFault(
        f"internal error: {type(error).__name__}: {error}; add --traceback for details and please report it"
    )


def _usage_line(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "detaudit"
    message = error.format_message().rstrip()
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} Try '{path} --help'."


def _say(message: str, slug: str = "") -> None:
    page = f"  [{slug}, see docs/messages.md#{slug}]" if slug else ""
    _write(f"detaudit: {' '.join(message.split())}{page}")


def _write(text: str) -> None:
    if not text or sys.stderr is None:
        return
    try:
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody reads stderr; the exit code still tells


def _flush(code: int) -> int:
    """Flush stdout now, since Python would end with 120 if that failed at shutdown."""
    if sys.stdout is None:
        return code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = errors.EXIT_CLOSED_PIPE
    except OSError as error:
        if code != errors.EXIT_ERROR:  # else the command itself met it and has said so
            _say(f"cannot write the output: {error.strerror}", errors.TraceNotWritten.slug)
        code = errors.EXIT_ERROR
    except ValueError:  # closed by someone else
        return code
    else:
        return code
    _discard(sys.stdout)
    return code


def _discard(stream: IO[Any]) -> None:
    """Point a stream's descriptor at /dev/null, so that what is still buffered goes nowhere quietly."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError):
        pass


def _reader_gone(stream: IO[Any] | None) -> bool:
    """Whether the other end of a stream is closed: a BrokenPipeError may also come from a worker's pipe."""
    try:
        if stream is None:
            return False
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False


def _prepare_streams() -> None:
    # With stdout closed, the next file opened would get its descriptor and receive our prints.
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        # A file name or a module path may hold what the terminal's encoding cannot say.
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
