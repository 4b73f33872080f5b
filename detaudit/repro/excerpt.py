"""Cuts functions out of our own source, together with all they use, for a script that must stand alone.

The text is taken from the source files as it is, so that a script cannot drift from what detaudit runs. Only
two things are changed: imports of detaudit are dropped, and ``module.name`` becomes ``name``.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = "detaudit"

Key = tuple[str, str]
"""(module, name)"""


@dataclass(frozen=True, slots=True)
class Import:
    """``import module as bound``, or ``from module import name as bound``."""

    module: str
    name: str | None
    bound: str

    @property
    def alias(self) -> str:
        own = self.name or self.module.partition(".")[0]
        return "" if own == self.bound else f" as {self.bound}"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """``imports``: of other packages. ``sections``: (module, its definitions), in an order in which each uses
    only those before it when it is executed."""

    imports: tuple[Import, ...]
    sections: tuple[tuple[str, str], ...]


def excerpt(roots: Sequence[str], stand_ins: Mapping[str, str] | None = None) -> Excerpt:
    """Everything that ``roots`` need.

    Args:
        roots: ``module:name``.
        stand_ins: ``module:name`` to the ``module:name`` that is taken in its place; the names are the same.

    Raises:
        ValueError: a root does not exist, or two different definitions have one name.
    """
    replaced = {_key(old): _key(new) for old, new in (stand_ins or {}).items()}
    waiting = [_key(root) for root in roots]
    needed: dict[Key, _Definition] = {}
    imports: set[Import] = set()
    while waiting:
        key = waiting.pop()
        key = replaced.get(key, key)
        if key in needed:
            continue
        module = _module(key[0])
        if key[1] not in module.definitions:
            raise ValueError(f"{key[0]} defines no {key[1]}")
        definition = needed[key] = module.definitions[key[1]]
        for name, attribute in definition.references:
            target = module.target(name, attribute)
            if target is not None:
                waiting.append(target)
            elif name in module.imports:
                imports.add(module.imports[name])
    _check_names(needed)
    return Excerpt(
        tuple(sorted(imports, key=lambda found: (found.module, found.name or "", found.bound))),
        tuple(
            (name, _section(name, needed)) for name in _ordered({module for module, _ in needed}, replaced)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Definition:
    """Lines ``start`` to ``end`` of a module (from 1, inclusive) and the names used there."""

    start: int
    end: int
    references: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class _Module:
    """``ours``: imported name to its (module, name), or (module, "") for a module of ours. ``imports``: names
    imported from elsewhere."""

    lines: tuple[str, ...]
    definitions: Mapping[str, _Definition]
    ours: Mapping[str, Key] = field(default_factory=dict)
    imports: Mapping[str, Import] = field(default_factory=dict)
    name: str = ""

    def target(self, name: str, attribute: str | None) -> Key | None:
        """The definition of ours that ``name`` or ``name.attribute`` stands for."""
        if name in self.definitions:
            return self.name, name
        if name not in self.ours:
            return None
        module, own = self.ours[name]
        return (module, own) if own else (module, attribute or "")


def _key(text: str) -> Key:
    module, _, name = text.partition(":")
    return module, name


@cache
def _module(name: str) -> _Module:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no source of {name}")
    # From the file: a loader that someone has put in the place of Python's may not hand out its source.
    source = Path(spec.origin).read_text(encoding="utf-8")
    body = ast.parse(source).body
    ours: dict[str, Key] = {}
    imports: dict[str, Import] = {}
    definitions: dict[str, _Definition] = {}
    for index, node in enumerate(body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _note_import(node, ours, imports)
        elif names := _defined(node):
            after = body[index + 1] if index + 1 < len(body) else None
            end = after if after is not None and _is_docstring(after) else node
            decorators = getattr(node, "decorator_list", [])
            start = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            definition = _Definition(start, end.end_lineno or end.lineno, tuple(_references(node)))
            definitions |= dict.fromkeys(names, definition)
    return _Module(tuple(source.splitlines()), definitions, ours, imports, name)


def _note_import(node: ast.Import | ast.ImportFrom, ours: dict[str, Key], imports: dict[str, Import]) -> None:
    for alias in node.names:
        bound = alias.asname or alias.name.partition(".")[0]
        source = (node.module or "") if isinstance(node, ast.ImportFrom) else None
        if source is None:
            imports[bound] = Import(alias.name, None, bound)
        elif source.partition(".")[0] != PACKAGE:
            imports[bound] = Import(source, alias.name, bound)
        elif _exists(f"{source}.{alias.name}"):
            ours[bound] = (f"{source}.{alias.name}", "")
        elif alias.asname is None:
            ours[bound] = (source, alias.name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    ]


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _references(node: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Names used, each with the attribute that is asked of it, if any."""
    owners: set[int] = set()
    for part in ast.walk(node):  # an attribute comes before its owner
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            owners.add(id(part.value))
            yield part.value.id, part.attr
        elif isinstance(part, ast.Name) and id(part) not in owners:
            yield part.id, None


def _check_names(needed: Mapping[Key, _Definition]) -> None:
    homes: dict[str, str] = {}
    for module, name in needed:
        if homes.setdefault(name, module) != module:
            raise ValueError(f"{name} is defined in {homes[name]} and in {module}; rename one")


def _ordered(modules: set[str], replaced: Mapping[Key, Key]) -> list[str]:
    """Each module behind those it imports."""
    found: list[str] = []

    def visit(name: str) -> None:
        if name in found:
            return
        for target in sorted(set(_module(name).ours.values())):
            inner = replaced.get(target, target)[0]
            if inner in modules and inner != name:
                visit(inner)
        found.append(name)

    for name in sorted(modules):
        visit(name)
    return found


def _section(name: str, needed: Mapping[Key, _Definition]) -> str:
    """The definitions of one module that are needed, in the order of the file."""
    module = _module(name)
    spans = sorted({(d.start, d.end) for (home, _), d in needed.items() if home == name})
    return "\n\n\n".join(_cut(module, start, end) for start, end in spans)


def _cut(module: _Module, start: int, end: int) -> str:
    """Lines of the file, with ``module.name`` shortened where ``module`` is one of ours."""
    lines = [line.encode() for line in module.lines[start - 1 : end]]
    tree = ast.parse(b"\n".join(lines))
    found = [
        (part.value.lineno, part.value.col_offset, len(part.value.id) + 1)
        for part in ast.walk(tree)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and module.ours.get(part.value.id, ("", "x"))[1] == ""
    ]
    for row, column, length in sorted(found, reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + line[column + length :]
    return b"\n".join(lines).decode()
