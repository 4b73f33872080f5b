"""Cutting functions out of the source: all they need, nothing else, and text that is the source's own."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from detaudit.kernels import finalize, nvfp4, reference
from detaudit.repro.excerpt import excerpt
from detaudit.repro.script import FLASHINFER, OPERATOR, REFERENCE, Kind, build_script

KINDS = pytest.mark.parametrize("kind", [REFERENCE, OPERATOR, FLASHINFER], ids=lambda kind: kind.subject)


def packages_imported(script: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """A package ``detaudit_<name>`` would not count as ours, so the modules are put beside detaudit's own."""
    import detaudit

    monkeypatch.setattr(detaudit, "__path__", [*detaudit.__path__, str(folder)])
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


@KINDS
def test_a_script_imports_nothing_of_ours(kind: Kind) -> None:
    packages = packages_imported(build_script(kind, "Title.", threads=4, runs=10))
    assert "detaudit" not in packages
    assert {"torch", "safetensors"} <= packages
    assert ("flashinfer" in packages) == (kind is FLASHINFER)
    assert not packages & {"numpy", "xxhash", "click", "rich"}


@KINDS
def test_every_name_of_a_script_is_defined(kind: Kind) -> None:
    """Compiled alone, it has no global name that neither it nor Python defines."""
    script = build_script(kind, "Title.", threads=4, runs=10)
    tree = ast.parse(script)
    bound = set(dir(__builtins__)) if not isinstance(__builtins__, dict) else set(__builtins__)
    bound |= {"__file__", "__name__"}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in names}
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.MatchAs(name=str(name)):
                bound.add(name)
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert not used - bound


def test_the_text_is_that_of_the_source() -> None:
    script = build_script(REFERENCE, "Title.", threads=4, runs=10)
    for function in (
        nvfp4.quantize_values,
        nvfp4.round_e2m1,
        finalize.finalize_atomic,
        finalize.finalize_ordered,
        reference.swiglu,
    ):
        assert inspect.getsource(function).strip() in script
    shortened = inspect.getsource(reference._Gemm).replace("nvfp4.", "")
    assert "nvfp4." in inspect.getsource(reference._Gemm)
    assert shortened.strip() in script
    assert "class NVFP4Experts" not in script
    assert "def moe_fp64" not in script


def test_what_is_needed_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        monkeypatch,
        excerpt_below="import math\nONE = 1\n'''Why one.'''\nTWO = ONE + 1\ndef unused(): return math.pi\n",
        excerpt_above=(
            "import json\nimport functools as ft\nfrom collections import abc\n"
            "from detaudit import excerpt_below\n"
            "@ft.cache\ndef top(x: abc.Sized):\n    é = 'ünïcode', excerpt_below.TWO  # kept\n    return é\n"
        ),
    )
    found = excerpt(["detaudit.excerpt_above:top"])
    assert [(item.module, item.name, item.bound) for item in found.imports] == [
        ("collections", "abc", "abc"),
        ("functools", None, "ft"),
    ]
    assert found.sections == (
        ("detaudit.excerpt_below", "ONE = 1\n'''Why one.'''\n\n\nTWO = ONE + 1"),
        (
            "detaudit.excerpt_above",
            "@ft.cache\ndef top(x: abc.Sized):\n    é = 'ünïcode', TWO  # kept\n    return é",
        ),
    )


def test_two_definitions_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        monkeypatch,
        excerpt_one="def same(): return 1\n",
        excerpt_two="from detaudit import excerpt_one\ndef same(): return excerpt_one.same()\n",
    )
    with pytest.raises(ValueError, match=r"same is defined in detaudit\.excerpt_"):
        excerpt(["detaudit.excerpt_two:same"])


def test_a_root_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="defines no nothing"):
        excerpt(["detaudit.kernels.nvfp4:nothing"])


def test_a_stand_in_takes_the_place() -> None:
    script = build_script(REFERENCE, "Title.", threads=4, runs=10)
    assert "class UsageError(ValueError)" in script
    assert "DetauditError" not in script
