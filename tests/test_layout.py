"""The house stands as drawn: one-way dependencies, light imports, links, wheel contents, sizes, docs."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from detaudit.core.records import FINDING_KINDS
from tests.layout import PACKAGE, ROOT, imports, loaded_by, sources, tree

BELOW: dict[str, set[str]] = {
    "core": set(),
    "hooks": {"core"},
    "kernels": {"core"},
    "trace": {"core"},
    "compare": {"core"},
    "progress": set(),
    "reporters": {"core", "progress"},
    "scan": {"core"},
}
"""What each part may import, apart from itself."""
APPLICATION = {"core", "hooks", "kernels", "trace", "compare", "scan", "progress"}
"""What the rest (audit, gate, repro, doctor, ...) may import, apart from each other."""
COMMANDS = {"commands", "cli", "__main__", "pytest_plugin"}
"""Nothing below imports these."""
LIGHT = (
    "cli", "commands", "core.errors", "core.files", "core.geometry", "core.recording", "core.records",
    "core.stats", "trace", "compare", "gate", "reporters", "scan",
)  # fmt: skip
HEAVY = ("torch", "numpy", "flashinfer", "triton")


def part_of(module: str) -> str:
    """``detaudit.trace.reader`` belongs to ``trace``; the package itself to ``""``."""
    return module.split(".")[1] if "." in module else ""


def allowed(importer: str, imported: str) -> bool:
    mine, other = part_of(importer), part_of(imported)
    if mine in COMMANDS:
        return other != "cli" or mine == "__main__"
    if mine == other or imported == "detaudit":
        return True
    if mine in BELOW:
        return other in BELOW[mine]
    if other in COMMANDS:
        return False
    below = any(
        imported == f"detaudit.{name}" or imported.startswith(f"detaudit.{name}.") for name in APPLICATION
    )
    return below or other not in BELOW


def light_modules() -> list[str]:
    prefixes = tuple(f"detaudit.{name}" for name in LIGHT)
    return [module for module in sources() if module.startswith(prefixes)]


def test_hooks_and_kernels_are_relative_links_without_an_init() -> None:
    for name in ("hooks", "kernels"):
        assert (PACKAGE / name).is_symlink()
        assert os.readlink(PACKAGE / name) == f"../{name}"
        assert (ROOT / name).is_dir()
        assert not (ROOT / name / "__init__.py").exists()
        assert any(module.startswith(f"detaudit.{name}.") for module in sources())


@pytest.mark.parametrize("module", sources())
def test_dependencies_point_one_way(module: str) -> None:
    ours = [found for found in imports(module) if found.name.split(".")[0] == "detaudit"]
    wrong = [f"line {found.line}: {found.name}" for found in ours if not allowed(module, found.name)]
    assert not wrong, f"{module} may not import {wrong}; see CONTRIBUTING.md"
    bare = [found.name for found in imports(module) if found.name.split(".")[0] in ("hooks", "kernels")]
    assert not bare, f"{module} imports {bare}; write detaudit.{bare[0]}"


def test_the_rules_themselves() -> None:
    assert allowed("detaudit.commands.run", "detaudit.auditing")
    assert allowed("detaudit.auditing", "detaudit.trace.writer")
    assert allowed("detaudit.auditing", "detaudit.progress")
    assert allowed("detaudit.auditing", "detaudit.execution")
    for importer, imported in [
        ("detaudit.core.records", "detaudit.trace"),
        ("detaudit.hooks.tree", "detaudit.kernels.cases"),
        ("detaudit.compare.analysis", "detaudit.trace"),
        ("detaudit.reporters.terminal", "detaudit.compare"),
        ("detaudit.auditing", "detaudit.commands.run"),
        ("detaudit.auditing", "detaudit.reporters.progress"),
        ("detaudit.commands.run", "detaudit.cli"),
    ]:
        assert not allowed(importer, imported), (importer, imported)


def test_no_import_cycles() -> None:
    graph = {
        module: {found.name for found in imports(module) if found.at_load and found.name in sources()}
        - {module}
        for module in sources()
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


@pytest.mark.parametrize("module", light_modules())
def test_light_modules_import_nothing_heavy(module: str) -> None:
    found = sorted(name for name in loaded_by(module) if name.split(".")[0] in HEAVY)
    assert not found


def test_light_modules_load_without_torch_in_a_real_process() -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_light_test_can_fail() -> None:
    assert "torch" in loaded_by("detaudit.core.digest")


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Length without the docstring: a long explanation is no burden."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_files_stay_small() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    assert not [
        f"{path}: {lines_of(path)} lines" for path in [*sources().values(), *scripts] if lines_of(path) > 400
    ]


def test_functions_stay_small() -> None:
    long = [
        f"{module}.{node.name}: {body_lines(node)} lines"
        for module in sources()
        for node in ast.walk(tree(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and body_lines(node) > 60
    ]
    assert not long


def headings(page: str) -> set[str]:
    return set(re.findall(r"^## (\S+)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE))


def slugs() -> set[str]:
    """Every ``slug = "..."`` in a class body of the project."""
    found = set()
    for module in sources():
        for cls in (node for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef)):
            for statement in cls.body:
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [getattr(statement, "target", None)]
                )
                value = getattr(statement, "value", None)
                if any(isinstance(t, ast.Name) and t.id == "slug" for t in targets) and isinstance(
                    value, ast.Constant
                ):
                    found.add(str(value.value))
    return found


def test_every_message_has_its_entry_and_no_entry_is_stale() -> None:
    assert "usage" in slugs()
    assert headings("messages.md") == slugs()


def test_every_finding_has_its_entry_and_no_entry_is_stale() -> None:
    assert headings("findings.md") == set(FINDING_KINDS)


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("messages.md", ("**Cause.**", "**Fix.**")),
        ("findings.md", ("**What.**", "**Why it matters.**", "**Example.**", "**Fix.**")),
    ],
)
def test_every_entry_is_complete(page: str, parts: tuple[str, ...]) -> None:
    entries = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n## ")[1:]
    incomplete = [entry.splitlines()[0] for entry in entries if not all(part in entry for part in parts)]
    assert not incomplete


def test_local_links_in_docs_lead_somewhere() -> None:
    broken = []
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")
    assert not broken


FAKE = "marker = 'hugging face'\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        ".git", "*.egg-info", "__pycache__", ".*_cache", ".venv*", "build", "*.detaudit*"
    )
    copy = shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=ignored)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run(
        [*command, "-w", str(folder), str(copy)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_hooks_and_kernels_below_detaudit_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"detaudit"}
    expected = {str(path.relative_to(ROOT)) for path in sources().values()}
    assert expected <= set(names)
    assert "detaudit/py.typed" in names


@pytest.mark.slow
def test_hugging_faces_kernels_survive_an_installation(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text(FAKE)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    code = "import kernels, detaudit.kernels.backend as ours; print(kernels.marker, ours.__file__)"
    done = python_at(tmp_path, site, code)
    assert done.stdout.split() == ["hugging", "face", str(site / "detaudit" / "kernels" / "backend.py")], (
        done.stderr
    )


def test_hugging_faces_kernels_win_in_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(FAKE)
    done = python_at(ROOT, tmp_path, "import kernels, detaudit.kernels; print(kernels.marker)")
    assert done.stdout == "hugging face\n", done.stderr


def python_at(folder: Path, site: Path, code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )
