"""Names of modules: the paths of ``named_modules()``, also for copies, replicas and modules made later."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from detaudit.core.recording import ModuleInfo
from detaudit.hooks.reach import reachable

_WRAPPED_AS = {"_orig_mod": "", "_fsdp_wrapped_module": "", "_checkpoint_wrapped_module": ""}
_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


@dataclass(eq=False, slots=True)
class Tree:
    """A module that was attached (``prefix``: its path), or met as the outermost one (``prefix`` is None)."""

    cls: str
    prefix: str | None = None
    number: int = 0

    def name(self, alone: bool) -> str:
        if self.prefix is not None:
            return self.prefix
        return "" if alone else f"{self.cls}#{self.number}"


@dataclass(eq=False, slots=True)
class Place:
    """Where a module is: its tree and its path there. ``wanted`` caches what --only and --exclude say."""

    tree: Tree
    path: str
    cls: str
    wanted: bool | None = field(default=None)

    def name(self, alone: bool) -> str:
        return join(self.tree.name(alone), self.path)


def join(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def inner_of(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper: torch.compile's, FSDP's, activation checkpointing's, DataParallel's."""
    children: dict[str, nn.Module | None] = module.__dict__.get("_modules") or {}
    for name in _WRAPPED_AS:
        if name in children:
            return children[name]
    if type(module).__name__ in _PARALLEL:
        return children.get("module")
    return None


def named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module and each of its names, wrappers' own path segments left out.

    Unlike ``nn.Module.named_modules`` a shared module comes once for every name (the first is the name of its
    first place), and a wrapper and the module it wraps have the same path.
    """
    yield from _named(module, prefix, [])


def _named(module: nn.Module, path: str, open_: list[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if any(module is ancestor for ancestor in open_):
        return
    yield path, module
    inner = inner_of(module)
    open_.append(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _named(child, path if child is inner else join(path, name), open_)
    open_.pop()


def innermost(module: nn.Module) -> nn.Module:
    inner = inner_of(module)
    return module if inner is None else innermost(inner)


class Names:
    """Finds the place of any module. Modules are referred to weakly."""

    def __init__(self) -> None:
        self.attached = False
        self.several = False
        self.trees: list[tuple[Tree, weakref.ref[nn.Module]]] = []
        self._places: dict[int, tuple[weakref.ref[nn.Module], Place]] = {}
        self._by_hooks: dict[int, tuple[weakref.ref[nn.Module], Place]] = {}

    def fork(self) -> Names:
        """The same names; what is added to the copy is not added here."""
        names = Names()
        names.attached, names.several = self.attached, self.several
        names.trees = list(self.trees)
        names._places, names._by_hooks = dict(self._places), dict(self._by_hooks)
        return names

    def add(self, module: nn.Module, prefix: str | None = None) -> Place:
        """Name a module and all below it; names given before stay."""
        cls = type(innermost(module)).__name__
        self.attached = self.attached or prefix is not None
        tree = Tree(cls, prefix, sum(t.prefix is None and t.cls == cls for t, _ in self.trees))
        self._take_in(tree, module)
        self.trees.append((tree, weakref.ref(module)))
        self._walk(tree, module)
        place = self.known(module)
        assert place is not None
        return place

    def _take_in(self, tree: Tree, module: nn.Module) -> None:
        """Trees whose root lies in ``module`` become part of its tree.

        A script may call a part of its model alone (to calibrate it, say) before it calls the whole.
        """
        paths = {id(member): path for path, member in reversed(list(named_modules(module)))}
        for known, ref in list(self.trees):
            root = ref()
            if known.prefix is None and root is not None and root is not module and id(root) in paths:
                self.trees.remove((known, ref))
                for _, place in self._places.values():
                    if place.tree is known:
                        place.tree, place.path = tree, join(paths[id(root)], place.path)
                        place.wanted = None

    def infos(self) -> tuple[ModuleInfo, ...]:
        """Every module of the attached trees, in the order of ``named_modules()``, with its other names."""
        paths: dict[int, list[str]] = {}
        classes: dict[int, str] = {}
        for tree, ref in self.trees:
            module = ref()
            if module is None or tree.prefix is None:
                continue
            for path, member in named_modules(module, tree.prefix):
                kept = innermost(member)
                found = paths.setdefault(id(kept), [])
                if path not in found:
                    found.append(path)
                classes[id(kept)] = type(kept).__name__
        return tuple(ModuleInfo(names[0], classes[key], tuple(names[1:])) for key, names in paths.items())

    def known(self, module: nn.Module) -> Place | None:
        entry = self._places.get(id(module))
        if entry is not None and entry[0]() is module:
            return entry[1]
        # A shallow copy, such as the replicas of DataParallel, shares the dict of hooks with its original.
        entry = self._by_hooks.get(id(module.__dict__.get("_forward_hooks")))
        if entry is not None and entry[0]() is not None:
            return entry[1]
        return None

    def find(self, module: nn.Module) -> Place:
        """The place of ``module``; one that belongs to no tree yet becomes a tree of its own."""
        place = self.known(module)
        if place is None:
            self._look_again(module)
            place = self.known(module)
        return place or self.add(module)

    def members(self, module: nn.Module) -> list[Place]:
        """Places of the named modules in ``module``, itself included."""
        places = (self.known(member) for _, member in named_modules(module))
        return list(dict.fromkeys(place for place in places if place is not None))

    def classes(self) -> set[type]:
        """Classes of all modules in all trees."""
        roots = (ref() for _, ref in self.trees)
        return {type(member) for root in roots if root is not None for member in root.modules()}

    def module_at(self, path: str) -> nn.Module | None:
        """A living module that has ``path`` among its names; of a wrapper and what it wraps, the latter."""
        for tree, ref in self.trees:
            root = ref()
            if root is not None:
                prefix = tree.name(alone=not self.attached and len(self.trees) == 1)
                for name, member in named_modules(root, prefix):
                    if name == path:
                        return innermost(member)
        return None

    def live_name(self, place: Place) -> str:
        """The name while the run goes on: the first outermost module met is taken for the only one.

        Unless ``several`` is set, because the run before this one met more than one.
        """
        if place.tree.prefix == "":
            return place.path
        alone = not self.attached and not self.several and place.tree is self.trees[0][0]
        return place.name(alone)

    def live_names(self, place: Place) -> tuple[str, ...]:
        """Every name that ``place`` may have in the end."""
        if self.attached:
            return (self.live_name(place),)
        return place.name(alone=place.tree is self.trees[0][0]), place.name(alone=False)

    def _look_again(self, module: nn.Module) -> None:
        for tree, ref in list(self.trees):
            root = ref()
            if root is None:
                continue
            if tree.prefix is not None and _alike(module, root):
                self._walk(tree, module)
                return
            self._walk(tree, root)

    def _walk(self, tree: Tree, root: nn.Module) -> None:
        met: dict[str, Place] = {}  # a wrapper and the module it wraps are one place
        for path, member in named_modules(root):
            entry = self._places.get(id(member))
            if entry is not None and entry[0]() is member:
                continue
            place = met.setdefault(path, Place(tree, path, type(innermost(member)).__name__))
            named = (weakref.ref(member), place)
            self._places[id(member)] = named
            hooks: Any = member.__dict__.get("_forward_hooks")
            if hooks is not None:
                self._by_hooks[id(hooks)] = named


def _alike(module: nn.Module, root: nn.Module) -> bool:
    """Whether ``module`` is a copy of the attached ``root``: same classes at the same paths."""
    if type(module) is not type(root) or not root._modules:
        return False
    return _shape(module) == _shape(root)


def _shape(module: nn.Module) -> list[tuple[str, type]]:
    return [(path, type(member)) for path, member in named_modules(module)]


def held_modules(model: object) -> list[tuple[str, nn.Module]]:
    """(path, module) of the outermost modules a callable holds: itself, its owner, or in its attributes."""
    while isinstance(model, functools.partial):
        model = model.func
    if isinstance(model, nn.Module):
        return [("", model)]
    model = getattr(model, "__self__", None) or model
    if isinstance(model, nn.Module):
        return [("", model)]
    held: list[tuple[str, nn.Module]] = []
    inside: dict[int, object] = {}
    for path, item in reachable("", model):
        if isinstance(item, nn.Module) and id(item) not in inside:
            held.append((path.removeprefix("."), item))
            inside.update((id(member), member) for member in item.modules())
    return held
