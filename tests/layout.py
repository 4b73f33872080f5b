"""The imports of every file of the project, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "detaudit"


@dataclass(frozen=True, slots=True)
class Import:
    """``module`` imports ``name``; ``at_load`` unless it is inside a function or for type checkers only."""

    module: str
    name: str
    line: int
    at_load: bool


@cache
def sources() -> dict[str, Path]:
    """Every module by the name it is imported as; hooks and kernels through their links."""
    found = {}
    for folder in (PACKAGE, PACKAGE / "hooks", PACKAGE / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_walk(module, tree(module), True))


def _walk(module: str, node: ast.AST, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = at_load and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = False
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom):
            for name in _from(module, child):
                yield Import(module, name, child.lineno, at_load)
        else:
            yield from _walk(module, child, inside)


def _from(module: str, node: ast.ImportFrom) -> Iterator[str]:
    """``from a import b`` is the module ``a.b`` if there is one, else ``a``."""
    base = node.module or ""
    if node.level:
        package = module.split(".") if sources()[module].name == "__init__.py" else module.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        base = ".".join([*package, *filter(None, [base])])
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        yield inner if inner in sources() else base


def loaded_by(module: str) -> set[str]:
    """Everything, of the project or not, that importing ``module`` imports; packages above it included."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        if parent in sources():
            waiting.append(parent)
        if name in sources():
            waiting += [found.name for found in imports(name) if found.at_load]
    return seen
