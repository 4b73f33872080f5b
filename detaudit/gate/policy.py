"""The policy: what must be shown, about which targets, and which modules may vary until when.

It stands in ``[tool.detaudit]`` of pyproject.toml, or at the top level of detaudit.toml. docs/gate.md lists
every key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from detaudit.core.errors import PolicyInvalid
from detaudit.core.options import DEFAULT_RUNS
from detaudit.core.stats import upper_bound
from detaudit.gate.fields import Table

FILE = "detaudit.toml"
PYPROJECT = "pyproject.toml"
LOCK = "detaudit.lock"
ROOT = "(root)"
"""How an allowance names the model itself, whose path is empty."""

Kernels = Literal["shown", "confirmed", "ignore"]
Unknown = Literal["report", "fail"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """Modules that may vary: a glob over their paths, why, and until when (the day itself included).

    ``target``: name of the only target it holds for; ``None`` for all.
    """

    module: str
    reason: str
    expires: date
    target: str | None = None

    def covers(self, target: str, module: str) -> bool:
        return self.target in (None, target) and fnmatchcase(module or ROOT, self.module or ROOT)


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """One target and what must be shown about it.

    Args:
        name: as in the policy; the lock knows the target by it.
        path: the file, with ``:FACTORY`` behind it where one is named.
        bound: largest acceptable upper bound (one-sided, 95%) on the share of runs that differ; None for any.
        conditions: those that must have been compared.
        devices: ``cpu``, ``cuda``, ``sm90``, or a part of a GPU's name; each must be there.
    """

    name: str
    path: str
    runs: int = DEFAULT_RUNS
    bound: float | None = None
    conditions: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    script: bool = False
    args: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of a repository.

    Args:
        source: the file it was read from; None for the defaults.
        folder: what its paths are relative to.
        budget: seconds for all targets together; None for as long as it takes.
        kernels: ``shown``: a vacuous control is not a pass; ``confirmed``: nothing but a confirmed outcome
            is; ``ignore``.
        unknown_environment: whether a missing baseline is reported, or is no pass.
        defaults: what holds for a target that the policy does not name.
    """

    source: Path | None
    folder: Path
    targets: tuple[TargetPolicy, ...] = ()
    allowances: tuple[Allowance, ...] = ()
    lock: str = LOCK
    budget: float | None = None
    kernels: Kernels = "shown"
    unknown_environment: Unknown = "report"
    new_suspects: Unknown = "fail"
    defaults: TargetPolicy = TargetPolicy("", "")

    @property
    def lock_path(self) -> Path:
        return self.folder / self.lock


def find_policy(start: Path) -> Policy:
    """The policy of the nearest folder, ``start`` or above, that has one; else the defaults.

    Raises:
        PolicyInvalid: it was found and cannot be meant.
    """
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / FILE).is_file():
            return read_policy(folder / FILE)
        if (folder / PYPROJECT).is_file() and "detaudit" in _tool(folder / PYPROJECT):
            return read_policy(folder / PYPROJECT)
    return Policy(None, start)


def read_policy(path: Path, today: date | None = None) -> Policy:
    """Read one file.

    Raises:
        PolicyInvalid: it does not exist, is not TOML, or says something that cannot be meant.
    """
    is_pyproject = path.name == PYPROJECT
    data = _tool(path).get("detaudit") if is_pyproject else _toml(path)
    where = f"{path.name}, [tool.detaudit]" if is_pyproject else path.name
    if data is None:
        raise PolicyInvalid(f"{path} has no [tool.detaudit]; add one, or name another file with --policy")
    return parse_policy(data, path, where, today or date.today())


def parse_policy(data: object, source: Path, where: str, today: date) -> Policy:
    """The policy in a parsed TOML table; ``where`` begins every message."""
    table = Table(data, where)
    defaults = _target_keys(table, TargetPolicy("", ""))
    policy = Policy(
        source=source,
        folder=source.parent,
        targets=_targets(table, defaults),
        allowances=tuple(_allowance(entry, today) for entry in table.tables("allow")),
        lock=table.text("lock", LOCK),
        budget=table.seconds("time-budget"),
        kernels=table.choice("kernels", ("shown", "confirmed", "ignore")),
        unknown_environment=table.choice("unknown-environment", ("report", "fail")),
        new_suspects=table.choice("new-suspects", ("fail", "report")),
        defaults=defaults,
    )
    table.nothing_else()
    _check_allowances(policy, where)
    return policy


def _target_keys(table: Table, defaults: TargetPolicy) -> TargetPolicy:
    """The keys that may stand for all targets, or for one."""
    found = TargetPolicy(
        name="",
        path="",
        runs=table.integer("runs", defaults.runs, least=2),
        bound=table.share("bound", defaults.bound),
        conditions=table.texts("conditions", defaults.conditions),
        devices=table.texts("devices", defaults.devices),
        only=table.texts("only", defaults.only),
        exclude=table.texts("exclude", defaults.exclude),
    )
    if found.bound is not None:
        _check_bound(found.runs, found.bound, table.where)
    return found


def _check_bound(runs: int, bound: float, where: str) -> None:
    """A bound that so few runs cannot show would never pass."""
    reachable = upper_bound(runs - 1)
    if reachable > bound:
        needed = next(n for n in range(runs, 1_000_000) if upper_bound(n - 1) <= bound)
        raise PolicyInvalid(
            f"{where}: {runs} runs cannot show a bound of {bound:g} ({reachable:.3g} at best); "
            f"set runs = {needed}"
        )


def _targets(table: Table, defaults: TargetPolicy) -> tuple[TargetPolicy, ...]:
    targets = []
    for entry in table.texts_or_tables("targets"):
        if isinstance(entry, str):
            path, one, keys = entry, Table({}, table.where), defaults
        else:
            one = entry
            path = one.text("path")
            keys = _target_keys(one, defaults)
        target = TargetPolicy(
            name=one.text("name", path),
            path=path,
            runs=keys.runs,
            bound=keys.bound,
            conditions=keys.conditions,
            devices=keys.devices,
            script=one.flag("script"),
            args=one.texts("args", ()),
            only=keys.only,
            exclude=keys.exclude,
        )
        one.nothing_else()
        targets.append(target)
    names = [target.name for target in targets]
    for name in names:
        if names.count(name) > 1:
            raise PolicyInvalid(f"{table.where}: two targets are called '{name}'; give one another 'name'")
    return tuple(targets)


def _allowance(table: Table, today: date) -> Allowance:
    found = Allowance(
        module=table.text("module"),
        reason=table.text("reason"),
        expires=table.day("expires"),
        target=table.text("target", "") or None,
    )
    table.nothing_else()
    if not found.reason.strip():
        raise PolicyInvalid(f"{table.where}: the allowance for '{found.module}' has an empty reason; say why")
    if found.expires < today:
        raise PolicyInvalid(
            f"{table.where}: the allowance for '{found.module}' expired on {found.expires}; "
            "fix the module, or give the allowance a later date and a reason that still holds"
        )
    return found


def _check_allowances(policy: Policy, where: str) -> None:
    names = {target.name for target in policy.targets}
    for allowance in policy.allowances:
        if allowance.target is not None and names and allowance.target not in names:
            raise PolicyInvalid(
                f"{where}: the allowance for '{allowance.module}' names the target '{allowance.target}', "
                f"which is not among the targets ({', '.join(sorted(names))})"
            )


def _tool(pyproject: Path) -> Mapping[str, Any]:
    tool = _toml(pyproject).get("tool", {})
    return tool if isinstance(tool, dict) else {}


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PolicyInvalid(f"there is no policy file {path}; check the path") from error
    except OSError as error:
        raise PolicyInvalid(f"cannot read the policy {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PolicyInvalid(f"{path} is not valid TOML: {error}") from error
