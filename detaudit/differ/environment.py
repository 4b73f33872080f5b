"""Environments of audits as flat, comparable entries, and the part of them that identifies one.

The fingerprint holds what is known to change bits: GPU, driver, CUDA, the libraries whose kernels run, and
the settings and variables that change numerics. Python, the kernel of the system and the number of cores are
left out, so that machines set up alike share a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from detaudit.core.gating import EnvironmentChange

ID_DIGITS = 12
_PREFIXES = ("gpu.", "torch.", "versions.", "settings.", "variables.")
_IRRELEVANT = frozenset({
    "settings.interop_threads",
    "variables.CUDA_VISIBLE_DEVICES",
    "variables.CUDA_MODULE_LOADING",
    "variables.PYTHONHASHSEED",
    "versions.detaudit",
    "versions.safetensors",
    "versions.xxhash",
})  # fmt: skip
_CPU_ONLY = ("cpu.model", "settings.threads")
"""Entries that decide the bits of a CPU, and would only tell equal GPU machines apart."""


def flatten(environment: Mapping[str, Any]) -> dict[str, str]:
    """Nested entries as dotted names with values as text; what is ``None`` is left out.

    GPUs are one entry, the kinds that are there and not how many of each: an audit uses one of them.
    """
    flat: dict[str, str] = {}
    for key, value in environment.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": text for name, text in flatten(value).items()})
        elif key == "devices" and isinstance(value, (list, tuple)):
            kinds = sorted({f"{item.get('name')} (sm{item.get('sm')})" for item in value})
            flat |= {key: ", ".join(kinds)} if kinds else {}
        elif isinstance(value, (list, tuple)):
            flat[key] = ", ".join(map(str, value))
        elif value is not None:
            flat[key] = str(value)
    return flat


def fingerprint(environment: Mapping[str, Any]) -> dict[str, str]:
    """The entries that identify an environment, sorted by name; empty where none was recorded."""
    flat = flatten(environment)
    on_cpu = "gpu.devices" not in flat
    return {
        name: flat[name]
        for name in sorted(flat)
        if name not in _IRRELEVANT
        and (name.startswith(_PREFIXES) or name == "cpu.capability" or name in _CPU_ONLY)
        and (on_cpu or name not in _CPU_ONLY)
    }


def identity(entries: Mapping[str, str]) -> str:
    """A short name for a fingerprint: equal entries, equal name."""
    text = json.dumps(dict(sorted(entries.items())), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:ID_DIGITS]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[EnvironmentChange, ...]:
    """Entries that differ, by name."""
    return tuple(
        EnvironmentChange(name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )
