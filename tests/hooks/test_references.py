"""References are replaced and put back in every place a function can be kept."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

from detaudit.hooks.references import replace_references


def make(name: str) -> Callable[..., str]:
    def function(*args: object) -> str:
        return name

    return function


def test_classes_see_the_change_although_python_caches_their_methods() -> None:
    old, new = make("old"), make("new")
    kept = (old, new)  # the variables are captured by the class body, and so replaced as well

    class Base:
        method = old
        static = staticmethod(old)

    class Child(Base):
        pass

    def seen() -> list[str]:
        return [Child().method(), Child.static(), Base.method()]

    assert seen() == ["old"] * 3
    replace_references({id(old): (old, new)}, set())
    assert seen() == ["new"] * 3
    replace_references({id(kept[1]): (kept[1], kept[0])}, set())
    assert seen() == ["old"] * 3
    assert vars(Base)["method"] is kept[0]


def test_containers_partials_and_defaults() -> None:
    old, new = make("old"), make("new")
    ordered: OrderedDict[str, Any] = OrderedDict(a=old)
    sparse: defaultdict[str, Any] = defaultdict(list, a=old)
    nested = functools.partial(min, key=old)
    first = functools.partial(map, old)

    def default(x: Any = old, *, y: Any = old) -> list[str]:
        return [x(), y()]

    replace_references({id(old): (old, new)}, set())
    assert [ordered["a"](), sparse["a"](), *default()] == ["new"] * 4
    assert nested.keywords["key"] is new
    assert first.args == (new,)


def test_spared_dicts_keep_what_they_hold() -> None:
    old, new = make("old"), make("new")
    spared, other = {"f": old}, {"f": old}
    replace_references({id(old): (old, new)}, {id(spared)})
    assert (spared["f"](), other["f"]()) == ("old", "new")


def test_equal_is_not_identical() -> None:
    class Same:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    old, twin = Same(), Same()
    table = {"old": old, "twin": twin}
    replace_references({id(old): (old, make("new"))}, set())
    assert callable(table["old"])
    assert table["twin"] is twin
