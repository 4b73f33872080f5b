"""``detaudit gate``: pass or fail a CI job on evidence."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from detaudit.commands.delivery import STDOUT, check, deliver, show
from detaudit.core.gating import GateResult
from detaudit.reporters.gating import FORMATS, gate_reporter

if TYPE_CHECKING:
    from detaudit.gate.gate import Gate
    from detaudit.gate.policy import Policy

EXAMPLES = """\b
Examples:
  detaudit gate                                    # the targets of [tool.detaudit]
  detaudit gate model.py --junit gate.xml --sarif gate.sarif
  detaudit gate run-on-the-h200.detaudit
  detaudit gate --update                           # take the bits of today as baseline
"""
FILE = click.Path(path_type=Path, dir_okay=False, allow_dash=True)


@click.command(epilog=EXAMPLES)
@click.argument("targets", metavar="[TARGET|TRACE]...", nargs=-1)
@click.option("--policy", "policy_file", type=FILE, help="Policy file, instead of the nearest one.")
@click.option("--update", is_flag=True, help="Write detaudit.lock, if all targets are stable.")
@click.option("--traces", type=click.Path(path_type=Path, file_okay=False), help="Folder to keep traces in.")
@click.option(
    "--scan",
    type=FILE,
    help="JSON of detaudit scan: fail on suspects that the lock does not know, or update these.",
)
@click.option("--json", "json_file", type=FILE, help="Write the result as JSON.")
@click.option("--junit", "junit_file", type=FILE, help="Write the result as JUnit XML.")
@click.option("--sarif", "sarif_file", type=FILE, help="Write the result as SARIF 2.1.0.")
@click.option("--markdown", "markdown_file", type=FILE, help="Write the result as Markdown.")
@click.option(
    "--github/--no-github",
    default=None,
    help="Print annotations and append to the step summary.  [default: if GITHUB_ACTIONS is true]",
)
def command(
    targets: tuple[str, ...],
    policy_file: Path | None,
    update: bool,
    traces: Path | None,
    scan: Path | None,
    github: bool | None,
    **files: Path | None,
) -> int:
    """Audit targets, or judge traces, and pass only if what the policy asks for was shown.

    The policy is [tool.detaudit] of the nearest pyproject.toml, or detaudit.toml; docs/gate.md lists its
    keys.

    Exit code: 0 passed, 1 nondeterminism or other bits than the baseline, 2 an audit could not be made,
    3 inconclusive: something that the policy asks for was not shown.
    """
    from detaudit.gate.gate import Gate
    from detaudit.gate.lock import read_lock
    from detaudit.gate.policy import find_policy, read_policy
    from detaudit.gate.subjects import subjects
    from detaudit.reporters.progress import progress

    outputs = {name: path for name in FORMATS if (path := files[f"{name}_file"]) is not None}
    policy = find_policy(Path.cwd()) if policy_file is None else read_policy(policy_file)
    lock = read_lock(policy.lock_path)
    examined = subjects(targets, policy, optional=scan is not None)
    read = [policy.source, policy.lock_path, scan, *(s.trace or Path(s.file) for s in examined)]
    for path in outputs.values():
        check(path, *read)
        read.append(path)
    if update:
        check(policy.lock_path)
    with progress(len(examined), "starting") as shown:
        gate = Gate(policy, lock, update, traces, scan, shown)
        result = gate.run(examined)
    for message in gate.messages:
        click.echo(message.rstrip(), err=True)
    if update:
        result = _update(gate, result, policy)
    in_actions = os.environ.get("GITHUB_ACTIONS") == "true" if github is None else github
    _report(result, outputs, in_actions)
    return result.exit_code


def _update(gate: Gate, result: GateResult, policy: Policy) -> GateResult:
    """Write the lock file, unless a target is not stable: a baseline of the others would look complete."""
    from dataclasses import replace

    from detaudit.gate.lock import write_lock

    if result.status != "passed":
        note = f"{policy.lock_path.name} was not written: not every target passed"
        return replace(result, notes=(*result.notes, note))
    names = {target.name for target in policy.targets}
    examined = {target.name for target in result.targets}
    lock = gate.lock.kept_to(sorted(names | examined)) if names and names <= examined else gate.lock
    write_lock(policy.lock_path, lock)
    return replace(result, notes=(*result.notes, f"wrote {policy.lock_path}"))


def _report(result: GateResult, outputs: dict[str, Path], in_actions: bool) -> None:
    aside = STDOUT in outputs.values()
    show(lambda stream: gate_reporter("terminal").render(result, stream), aside=aside)
    for format_, path in outputs.items():
        deliver(partial(gate_reporter(format_).render, result), path)
    if in_actions:
        show(lambda stream: gate_reporter("github").render(result, stream), aside=aside)
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary:
            _append(Path(summary), _text("markdown", result))


def _text(format_: str, result: GateResult) -> str:
    stream = io.StringIO()
    gate_reporter(format_).render(result, stream)
    return stream.getvalue()


def _append(path: Path, text: str) -> None:
    """GitHub collects what every step appends to its summary file."""
    from detaudit.core.files import not_written

    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise not_written(path, error) from error
