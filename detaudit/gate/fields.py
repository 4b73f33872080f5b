"""Reading a table of the policy key by key, with errors that name the key and what it should be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, NoReturn, TypeVar

from detaudit.core.errors import PolicyInvalid

T = TypeVar("T")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600}
_REQUIRED: Any = object()


class Table:
    """A TOML table. Every method takes a key out; ``nothing_else`` complains of what is left.

    Raises:
        PolicyInvalid: from every method, for a value of another kind.
    """

    def __init__(self, data: object, where: str) -> None:
        self.where = where
        if not isinstance(data, dict):
            raise PolicyInvalid(f"{where} is not a table; write it as keys and values")
        self._left = dict(data)
        self._known: list[str] = []

    def text(self, key: str, default: str = _REQUIRED) -> str:
        value = self._take(key, default)
        return value if isinstance(value, str) else self._wrong(key, value, "a string")

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._take(key, default)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            self._wrong(key, value, "a list of strings")
        return tuple(value)

    def flag(self, key: str) -> bool:
        value = self._take(key, False)
        return value if isinstance(value, bool) else self._wrong(key, value, "true or false")

    def integer(self, key: str, default: int, *, least: int) -> int:
        value = self._take(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        self._wrong(key, value, f"an integer of at least {least}")

    def share(self, key: str, default: float | None) -> float | None:
        value = self._take(key, default)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
            return float(value)
        self._wrong(key, value, "a number above 0 and at most 1")

    def seconds(self, key: str) -> float | None:
        """``90``, ``"90s"``, ``"15 min"`` or ``"1h"``."""
        value = self._take(key, None)
        if value is None:
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", str(value))
        if found and not isinstance(value, bool) and float(found[1]) > 0:
            return float(found[1]) * _UNITS[found[2] or "s"]
        self._wrong(key, value, 'a time, such as "90s", "15min" or "1h"')

    def day(self, key: str) -> date:
        value = self._take(key, _REQUIRED)
        if isinstance(value, datetime):
            return value.date()
        if isinstance(value, date):
            return value
        try:
            return date.fromisoformat(value)
        except (TypeError, ValueError):
            self._wrong(key, value, "a date, such as 2027-01-31")

    def choice(self, key: str, choices: Sequence[T]) -> T:
        value = self._take(key, choices[0])
        for choice in choices:
            if choice == value:
                return choice
        self._wrong(key, value, " or ".join(f'"{choice}"' for choice in choices))

    def tables(self, key: str) -> list[Table]:
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self._wrong(key, value, f"a list of tables; write [[{key}]]")
        return [Table(item, f"{self.where}, {key} {i}") for i, item in enumerate(value, 1)]

    def texts_or_tables(self, key: str) -> list[str | Table]:
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, (str, dict)) for item in value):
            self._wrong(key, value, "a list of file names or of tables with a 'path'")
        where = f"{self.where}, {key}"
        return [v if isinstance(v, str) else Table(v, f"{where} {i}") for i, v in enumerate(value, 1)]

    def nothing_else(self) -> None:
        for key in self._left:
            near = difflib.get_close_matches(key, self._known, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(sorted(self._known))}"
            raise PolicyInvalid(f"{self.where}: unknown key '{key}'; {hint}")

    def _take(self, key: str, default: Any) -> Any:
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is _REQUIRED:
            raise PolicyInvalid(f"{self.where}: '{key}' is missing; add it")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> NoReturn:
        raise PolicyInvalid(f"{self.where}: {key} is {value!r}; expected {expected}")
