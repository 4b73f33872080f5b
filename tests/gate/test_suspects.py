"""The rule "no new suspects", through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from detaudit.core.scans import Atomic, FileScan, KernelScan, ScanReport
from tests.gate.repository import Repository, one_line

ADD = Atomic("accumulation", "add", "bf16x8", "global", False, False, "REDG.E.ADD.BF16x8.RN.STRONG.GPU")
KNOWN = KernelScan("known", "known", "sm_90a", "a.so", True, (ADD,))
ADDED = KernelScan("added", "added<FINALIZE>", "sm_90a", "a.so", True, (ADD,))
FILES = (FileScan("a.so", 1, 2),)


def scan(repository: Repository, name: str, *kernels: KernelScan, files: tuple[FileScan, ...] = FILES) -> str:
    repository.write(name, json.dumps(ScanReport(kernels, files).to_json()))
    return name


def test_new_suspects_fail_and_known_ones_do_not(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\n")
    before = scan(repository, "before.json", KNOWN)
    no_lock = repository.gate("--scan", before)
    assert no_lock.returncode == 3
    assert "--update --scan" in no_lock.stdout
    assert repository.gate("--update", "--scan", before).returncode == 0
    assert repository.gate("--scan", before).returncode == 0
    after = scan(repository, "after.json", KNOWN, ADDED)
    failed = repository.gate("--scan", after)
    assert failed.returncode == 1
    assert "1 new kernels can accumulate in an unordered way: added<FINALIZE> (sm_90a)" in failed.stdout
    repository.edit("pyproject.toml", "runs = 2", 'runs = 2\nnew-suspects = "report"')
    assert repository.gate("--scan", after).returncode == 0
    assert repository.gate("--update", "head.py").returncode == 0
    assert repository.gate("--scan", before).returncode == 0


def test_a_scan_that_read_nothing_or_not_everything_shows_nothing(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\n")
    assert repository.gate("--update", "--scan", scan(repository, "s.json", KNOWN)).returncode == 0
    assert repository.gate("--scan", scan(repository, "none.json")).returncode == 3
    partly = scan(repository, "p.json", KNOWN, files=(replace(FILES[0], problem="truncated"),))
    done = repository.gate("--scan", partly)
    assert done.returncode == 3
    assert "not everything was read: a.so: truncated" in done.stdout


def test_broken_files(tmp_path: Path) -> None:
    repository = Repository(tmp_path, policy="[tool.detaudit]\nruns = 2\n")
    good = scan(repository, "s.json", KNOWN)
    for name, text in (("gone.json", None), ("bad.json", "{"), ("list.json", "[]"), ("other.json", "{}")):
        if text is not None:
            repository.write(name, text)
        done = repository.gate("--scan", name)
        assert done.returncode == 2
        assert one_line(done)
    assert repository.gate("--update", "--scan", good).returncode == 0
    repository.edit("detaudit.lock", '"accumulates"', '"accumulate"')
    done = repository.gate("--scan", good)
    assert done.returncode == 2
    assert "detaudit.lock is damaged" in one_line(done)
