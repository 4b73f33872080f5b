"""Suspects as a lock file keeps them, and those that are new. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from detaudit.core.errors import TraceUnreadable
from detaudit.core.scans import FORMAT, KernelScan, ScanReport

Identity = tuple[str, str, tuple[str, ...]]


def lock_suspects(scan: ScanReport) -> list[dict[str, Any]]:
    """What a lock file keeps of a scan, JSON-compatible: each suspect with what it accumulates, sorted.

    Files are left out, since a library may be installed elsewhere on the next machine, and so is the suffix
    of ``sm_90a``, which older disassemblers do not tell.
    """
    kept = {_identity(kernel): kernel.short for kernel in scan.suspects}
    return [
        {"kernel": name, "arch": arch, "accumulates": list(what), "short": short}
        for (name, arch, what), short in sorted(kept.items())
    ]


def new_suspects(scan: ScanReport, lock: Mapping[str, Any]) -> list[KernelScan]:
    """Suspects of ``scan`` that ``lock`` does not allow.

    A suspect is allowed if the lock has one of the same symbol and architecture that accumulates at least
    the same types at the same scopes: a kernel that accumulates in one more way is new.

    Args:
        lock: anything with ``suspects`` as ``lock_suspects`` gives them, or the JSON of a scan.

    Raises:
        TraceUnreadable: the lock has no readable list of suspects.
    """
    allowed: dict[tuple[str, str], set[str]] = {}
    for name, arch, what in _locked(lock):
        allowed.setdefault((name, arch), set()).update(what)
    found: dict[Identity, KernelScan] = {}
    for kernel in scan.suspects:
        name, arch, what = _identity(kernel)
        if (name, arch) not in allowed or not set(what) <= allowed[name, arch]:
            found.setdefault((name, arch, what), kernel)
    return list(found.values())


def _identity(kernel: KernelScan) -> Identity:
    ways = {
        f"{atomic.operation}.{atomic.dtype} {atomic.scope}"
        for atomic in kernel.atomics
        if atomic.category == "accumulation"
    }
    return kernel.name, _plain(kernel.arch), tuple(sorted(ways))


def _plain(arch: str) -> str:
    return arch.rstrip("af")


def _locked(lock: Mapping[str, Any]) -> Iterable[Identity]:
    if lock.get("format") == FORMAT:
        return [_identity(kernel) for kernel in ScanReport.from_json(lock).suspects]
    suspects = lock.get("suspects")
    if not isinstance(suspects, Sequence) or isinstance(suspects, str):
        raise TraceUnreadable("the lock holds no list of suspects; write one with 'detaudit scan'")
    try:
        return [
            (str(item["kernel"]), _plain(str(item["arch"])), tuple(map(str, item["accumulates"])))
            for item in suspects
        ]
    except (KeyError, TypeError) as error:
        raise TraceUnreadable(
            f"the lock's list of suspects is damaged ({error!r}); write it again"
        ) from error
