"""Targets: told from scripts without running them, and imported as Python would."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from detaudit.core.errors import TargetInvalid, TargetNotFound, TargetRaised
from detaudit.target import load, resolve, target_errors

MODEL = "def build_model(): return abs\n"
INPUTS = "def make_inputs(): return -1\n"


@pytest.fixture(autouse=True)
def modules_as_they_were() -> Iterator[None]:
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def write(path: Path, source: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return str(path)


def test_a_function_target(tmp_path: Path) -> None:
    spec = resolve(write(tmp_path / "m_plain.py", MODEL + INPUTS))
    assert (spec.factory, spec.is_script, spec.label) == ("build_model", False, "m_plain.py")
    target = load(spec)
    assert target.run(target.build(), target.make_inputs()) == 1
    assert target.module.__name__ == "m_plain"


def test_another_factory(tmp_path: Path) -> None:
    path = write(tmp_path / "m_other.py", "def small(): return abs\n" + INPUTS)
    assert resolve(f"{path}:small").label == "m_other.py:small"
    with pytest.raises(TargetNotFound, match="large"):
        resolve(f"{path}:large")
    with pytest.raises(TargetNotFound, match="colon"):
        resolve(f"{path}:no-name")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nprint('loss')\n",
        "if __name__ == '__main__':\n    def build_model(): pass\n    def make_inputs(): pass\n",
        "def main():\n    build_model = make_inputs = None\n",
    ],
)
def test_a_script_is_told_without_running_it(source: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m_script.py", "raise SystemExit('it ran')\n" + source)
    assert resolve(path).is_script


@pytest.mark.parametrize(
    "source",
    [
        "if True:\n    def build_model(): pass\nelse:\n    build_model = None\n" + INPUTS,
        "try:\n    from json import loads as build_model\nexcept ImportError:\n    pass\n" + INPUTS,
        "build_model = make_inputs = print\n",
        "build_model, make_inputs = print, print\n",
        "with open(__file__):\n    from json import loads as build_model, dumps as make_inputs\n",
    ],
)
def test_names_are_found_however_they_are_bound(source: str, tmp_path: Path) -> None:
    assert not resolve(write(tmp_path / "m_bound.py", source)).is_script


@pytest.mark.parametrize(
    "source", ["from m_library import *\n", "globals().update(__import__('m_library').__dict__)\n"]
)
def test_where_the_syntax_leaves_doubt_the_file_is_imported(source: str, tmp_path: Path) -> None:
    write(tmp_path / "m_library.py", MODEL + INPUTS)
    assert not resolve(write(tmp_path / "m_star.py", source)).is_script


def test_half_a_target_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TargetInvalid, match=r"no make_inputs\(\)"):
        resolve(write(tmp_path / "a.py", MODEL))
    with pytest.raises(TargetInvalid, match=r"no build_model\(\)"):
        resolve(write(tmp_path / "b.py", INPUTS))


def test_neighbours_are_importable_and_the_path_is_put_back(tmp_path: Path) -> None:
    write(tmp_path / "m_neighbour.py", "VALUE = 7\n")
    path = list(sys.path)
    target = load(resolve(write(tmp_path / "m_imports.py", "import m_neighbour\n" + MODEL + INPUTS)))
    assert target.module.m_neighbour.VALUE == 7
    assert sys.path == path


def test_a_module_of_a_package_has_its_relative_imports(tmp_path: Path) -> None:
    write(tmp_path / "m_package" / "__init__.py", "")
    write(tmp_path / "m_package" / "parts.py", MODEL)
    path = write(tmp_path / "m_package" / "model.py", "from .parts import build_model\n" + INPUTS)
    assert load(resolve(path)).module.__name__ == "m_package.model"


def test_a_name_that_is_taken_does_not_replace_the_other_module(tmp_path: Path) -> None:
    path = write(tmp_path / "random.py", MODEL + INPUTS)
    import random

    first = load(resolve(path))
    assert sys.modules["random"] is random
    assert load(resolve(path)).module is first.module


def test_what_the_file_raises_is_shown_with_its_own_frames(tmp_path: Path) -> None:
    path = write(tmp_path / "m_raises.py", MODEL + INPUTS + "def inner():\n    1 / 0\ninner()\n")
    with pytest.raises(TargetRaised, match="ZeroDivisionError") as caught:
        load(resolve(path))
    assert "m_raises.py" in caught.value.frames
    assert "importlib" not in caught.value.frames
    assert "target.py" not in caught.value.frames


def test_arguments_are_the_targets(tmp_path: Path) -> None:
    path = write(tmp_path / "m_argv.py", "import sys\nSEEN = sys.argv[1:]\n" + MODEL + INPUTS)
    assert load(resolve(path, argv=["--size", "3"])).module.SEEN == ["--size", "3"]


def test_a_function_that_ends_the_process_returned_nothing(tmp_path: Path) -> None:
    spec = resolve(write(tmp_path / "m_exits.py", MODEL + INPUTS))
    with pytest.raises(TargetRaised, match=r"sys.exit\(0\) while it ran"), target_errors(spec, "it ran"):
        sys.exit(0)
    script = resolve(write(tmp_path / "m_script.py", "print(1)\n"))
    with target_errors(script, "it ran"):
        sys.exit(0)


def test_vars_of_arguments_binds_no_names(tmp_path: Path) -> None:
    source = "import argparse\nprint(vars(argparse.Namespace()))\nraise SystemError('it was imported')\n"
    assert resolve(write(tmp_path / "m_vars.py", source)).is_script
