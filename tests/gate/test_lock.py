"""The lock file: what it keeps, how it reads in review, and what a comparison with it tells."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest

from detaudit.core.errors import LockUnreadable
from detaudit.core.gating import BaselineResult
from detaudit.differ.bits import bits
from detaudit.differ.environment import fingerprint
from detaudit.gate.baseline import compare_with_lock
from detaudit.gate.lock import KEPT_CALLS, Lock, dumps, read_lock, target_bits, write_lock
from tests.compare.builder import MemoryTrace, Node, node

H200: dict[str, Any] = {
    "python": "3.11.7 (CPython)",
    "system": "Linux 6.1",
    "cpu": {"model": "Xeon", "capability": "AVX512", "cores": 16},
    "versions": {"torch": "2.13.0", "flashinfer-python": "0.7.4", "detaudit": "0.1.0"},
    "torch": {"cuda": "13.0"},
    "gpu": {"driver": "580.1", "devices": [{"name": "NVIDIA H200", "sm": 90, "memory_gib": 140}]},
    "settings": {"threads": 16, "cudnn.allow_tf32": True},
    "variables": {},
}


def layers(*, changed: int | None = None, count: int = 12) -> list[Node]:
    """A chain of modules ``layers.N``; from ``changed`` on the bits are others."""

    def bit(index: int) -> str:
        return f"{index}{'!' if changed is not None and index > changed else ''}"

    children = [node(f"layers.{n}", bit(n), bit(n + 1)) for n in range(count)]
    return [node("", "0", bit(count), *children)]


def trace(calls: list[Node], *more: list[Node], inputs: str = "x", **records: Any) -> MemoryTrace:
    found = MemoryTrace()
    for run in (calls, *(more or (calls,))):
        found.add(run, final=run[0].out["out"], inputs=inputs, **records)
    return found


def locked(found: MemoryTrace, environment: dict[str, Any] = H200, lock: Lock | None = None) -> Lock:
    return (lock or Lock()).with_target("model.py", fingerprint(environment), target_bits(bits(found)))


def compared(lock: Lock, found: MemoryTrace, environment: dict[str, Any] = H200) -> BaselineResult:
    return compare_with_lock(lock, "model.py", fingerprint(environment), bits(found))


def newer(**versions: str) -> dict[str, Any]:
    return {**H200, "versions": {**H200["versions"], **versions}}


def test_the_same_on_every_machine_with_the_same_fingerprint(tmp_path: Path) -> None:
    """Another kernel, Python, CPU, core count, and two GPUs for one, are no other environment."""
    other = {
        **H200,
        "python": "3.12.1 (CPython)",
        "system": "Linux 6.8",
        "cpu": {"model": "EPYC", "capability": "AVX512", "cores": 64},
        "settings": {**H200["settings"], "threads": 64},
        "gpu": {"driver": "580.1", "devices": H200["gpu"]["devices"] * 2},
    }
    assert dumps(locked(trace(layers()))) == dumps(locked(trace(layers()), other))


def test_it_reads_back(tmp_path: Path) -> None:
    lock = locked(trace(layers()), lock=locked(trace(layers(changed=3)), newer(torch="2.14.0")))
    write_lock(tmp_path / "detaudit.lock", lock.with_suspects([{"kernel": "k"}]))
    found = read_lock(tmp_path / "detaudit.lock")
    assert found == lock.with_suspects([{"kernel": "k"}])
    assert dumps(found) == (tmp_path / "detaudit.lock").read_text()
    assert read_lock(tmp_path / "no.lock") == Lock()


def test_a_diff_shows_the_modules_that_changed_and_nothing_else() -> None:
    before, after = (dumps(locked(trace(layers(changed=c)))).splitlines() for c in (None, 10))
    changed = [line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[0] in "+-"]
    names = [line.split('"')[1] for line in changed if line[1] == " "]
    assert sorted(set(names)) == ["", "final", "layers.10", "layers.11"]
    order = [line.split('"')[1] for line in before if '"layers.' in line]
    assert order == [f"layers.{n}" for n in range(12)]


def test_equal_and_changed() -> None:
    lock = locked(trace(layers()))
    assert compared(lock, trace(layers())).comparison == "equal"
    found = compared(lock, trace(layers(changed=3)))
    assert (found.comparison, found.bits_equal) == ("changed", False)
    assert found.change is not None
    assert (found.change.module, found.change.kind, found.change.modules) == ("layers.3", "outputs", 10)


def test_an_unknown_environment_is_compared_with_the_nearest() -> None:
    lock = locked(trace(layers()))
    lock = locked(trace(layers(changed=0)), newer(torch="2.10.0", triton="3.0", numpy="2.0"), lock)
    found = compared(lock, trace(layers(changed=5)), newer(torch="2.14.0"))
    assert (found.comparison, found.bits_equal) == ("unknown-environment", False)
    assert [str(change) for change in found.environment_changes] == ["versions.torch: 2.13.0 -> 2.14.0"]
    assert found.change is not None
    assert found.change.module == "layers.5"
    same = compared(lock, trace(layers()), newer(torch="2.14.0"))
    assert (same.comparison, same.bits_equal, same.change) == ("unknown-environment", True, None)


def test_other_inputs_and_no_baseline() -> None:
    lock = locked(trace(layers()))
    found = compared(lock, trace(layers(), inputs="y"))
    assert (found.comparison, found.bits_equal) == ("other-inputs", None)
    assert compared(Lock(), trace(layers())).comparison == "absent"
    scripted = MemoryTrace().add(layers(), condition="fresh-process").add(layers(), condition="fresh-process")
    assert compared(lock, scripted).comparison == "absent"


def test_what_may_vary_has_no_bits() -> None:
    """Layer 3 varies, so nothing behind it is compared, and everything before it is."""
    varying = trace(layers(), layers(changed=3))
    lock = locked(varying)
    assert '"layers.3": "in ' in dumps(lock)
    assert "out varies" in dumps(lock)
    again = compared(lock, trace(layers(changed=7), layers(changed=3)))
    assert (again.comparison, again.calls, again.calls_varying) == ("equal", 3, 10)
    found = compared(lock, trace(layers(changed=2), layers(changed=2)))
    assert found.comparison == "changed"
    assert found.change is not None
    assert found.change.module == "layers.2"


def test_calls_of_one_module_beyond_the_kept_ones_share_an_entry() -> None:
    def steps(changed: int | None = None) -> list[Node]:
        return [node("block", n, f"{n}!" if n == changed else n) for n in range(KEPT_CALLS + 4)]

    lock = locked(trace(steps()))
    entry = json.loads(dumps(lock))["targets"]["model.py"]
    (target,) = entry.values()
    lines = target["conditions"]["in-process"]["modules"]["block"]
    assert len(lines) == KEPT_CALLS + 1
    assert lines[-1].endswith(f"calls {KEPT_CALLS} to last")
    assert compared(lock, trace(steps())).comparison == "equal"
    for call, named in ((2, 2), (KEPT_CALLS + 2, KEPT_CALLS)):
        change = compared(lock, trace(steps(changed=call))).change
        assert change is not None
        assert (change.module, change.call) == ("block", named)


def test_a_target_without_any_stable_bits_has_no_baseline() -> None:
    racing = trace([node("", "0", "a")], [node("", "0", "b")])
    found = compared(locked(racing), trace([node("", "0", "c")], [node("", "0", "d")]))
    assert (found.comparison, found.bits_equal, found.calls, found.calls_varying) == (
        "nothing-stable",
        None,
        0,
        1,
    )


def test_controls_have_no_baseline() -> None:
    found = trace(layers())
    for condition in ("hooks-off", "history-1", "superseded", "held-fixed-1"):
        found.add(layers(changed=1), condition=condition).add(layers(changed=2), condition=condition)
    assert list(bits(found)) == ["in-process"]
    assert dumps(locked(found)) == dumps(locked(trace(layers())))


def test_parameters_are_told() -> None:
    def weighted(weight: int, calls: list[Node]) -> MemoryTrace:
        return trace(calls, more={"parameters.before": {"layers.3.weight": weight, "layers.4.weight": 0}})

    lock = locked(weighted(1, layers()))
    change = compared(lock, weighted(2, layers(changed=3))).change
    assert change is not None
    assert (change.module, change.kind) == ("layers.3", "parameters")


def test_it_is_kept_to_what_is_used() -> None:
    lock = locked(trace(layers()))
    lock = lock.with_target("old.py", fingerprint(newer(torch="1.0")), target_bits(bits(trace(layers()))))
    kept = lock.kept_to(["model.py"])
    assert set(kept.targets) == {"model.py"}
    assert len(kept.environments) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"out 0', '"out x'),
        (" own ", " "),
        ('"versions.torch": "2.13.0"', '"versions.torch": "2.14.0"'),
        ('"inputs"', '"input"'),
        ('"environments": {', '"environments": {"x": 3, '),
        ('"final": "', '"final": "z'),
        ('"conditions"', '"condition"'),
        ("}\n}", "}"),
    ],
)
def test_damage_is_told(old: str, new: str, tmp_path: Path) -> None:
    text = dumps(locked(trace(layers())))
    if old == '"out 0':
        old, new = text[text.index(" out ") : text.index(" out ") + 8], " out xyz"
    assert old in text
    (tmp_path / "l").write_text(text.replace(old, new))
    with pytest.raises(LockUnreadable, match="detaudit gate --update"):
        read_lock(tmp_path / "l")
