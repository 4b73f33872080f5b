"""Help pages and start-up: every page has an example, and none needs torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import click
import pytest

from detaudit import __version__, cli
from tests.cli.programs import ROOT, detaudit, environment, python

LISTED = cli.group.list_commands(click.Context(cli.group))
HEAVY = ("torch", "numpy", "flashinfer", "triton", "xxhash", "safetensors", "rich")


def test_version() -> None:
    done = detaudit("--version")
    assert (done.returncode, done.stdout) == (0, f"detaudit {__version__}\n")


def test_help_lists_the_commands_that_exist_and_imports_none() -> None:
    code = (
        "import sys; from detaudit import cli; code = cli.run(['--help'])\n"
        "loaded = [m for m in sys.modules if m.startswith('detaudit.commands.')]\n"
        f"print('LOADED', loaded, [m for m in {HEAVY!r} if m in sys.modules]); sys.exit(code)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED [] []"
    for name in LISTED:
        assert f"\n  {name} " in done.stdout
    assert "report" in LISTED


def test_a_command_without_a_module_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "later": "Not built."})
    context = click.Context(cli.group)
    assert "later" not in cli.group.list_commands(context)
    assert cli.group.get_command(context, "later") is None


@pytest.mark.parametrize("name", LISTED)
def test_every_help_page_shows_an_example_and_needs_no_torch(name: str) -> None:
    code = (
        "import sys; from detaudit import cli; code = cli.run(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules; sys.exit(code)"
    )
    done = python(code, name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Example" in done.stdout
    assert f"detaudit {name}" in done.stdout.split("Example", 1)[1]
    assert "--traceback" in done.stdout


@pytest.mark.parametrize("name", LISTED)
def test_every_command_is_a_click_command(name: str) -> None:
    command = importlib.import_module(f"detaudit.commands.{name}").command
    assert isinstance(command, click.Command)
    assert command.help


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_short_and_long_help(flag: str) -> None:
    assert detaudit("report", flag).stdout.startswith("Usage: detaudit report [OPTIONS] TRACE")


def complete(words: str, index: int, shell: str = "bash") -> str:
    env = environment(_DETAUDIT_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=str(index))
    return detaudit(env=env).stdout


def test_completion_of_commands_and_options() -> None:
    assert "plain,report" in complete("detaudit re", 1)
    assert "plain,--format" in complete("detaudit report --fo", 2)
    assert "plain,markdown" in complete("detaudit report --format m", 3)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = detaudit(env=environment(_DETAUDIT_COMPLETE=f"{shell}_source"))
    assert done.returncode == 0, done.stderr
    assert "_DETAUDIT_COMPLETE" in done.stdout


def test_the_installed_program_is_the_same() -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "print(entry_points(group='console_scripts')['detaudit'].value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        pytest.skip("detaudit is not installed here")
    assert done.stdout.strip() == "detaudit.cli:main"
