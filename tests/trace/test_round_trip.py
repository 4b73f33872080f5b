"""What is written comes back: calls, records, values, run-level records, meta, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detaudit.core.recording import Call, ModuleInfo, Record, Run, RunColumns, Value
from detaudit.trace import Trace, TraceWriter, open_trace

NAMES = st.text(alphabet=st.characters(), max_size=6)
"""Lone surrogates included."""
DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "python.int", "python.str", "not_a_dtype"])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def values(draw: st.DrawFn) -> Value:
    # Few roots, so that equal roots with other dtypes or shapes occur.
    root = xxhash.xxh3_128_digest(bytes([draw(st.integers(0, 5))]))
    return Value(root, draw(DTYPES), draw(SHAPES), raw=draw(st.none() | st.binary(max_size=5)))


RECORDS = st.dictionaries(NAMES, values(), max_size=3).map(lambda sites: tuple(sorted(sites.items())))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    calls: list[Call] = []
    seen: dict[str, int] = {}
    for index in range(draw(st.integers(0, 6))):
        module = draw(st.sampled_from(["", "layers.0", "schicht.é", "層.1", "a\0b"]))
        ordinal = seen[module] = seen.get(module, -1) + 1
        parent = draw(st.integers(-1, index - 1))
        via = draw(st.sampled_from(["call", "forward", "graph"]))
        error = draw(st.sampled_from([None, "ValueError"]))
        records = (draw(RECORDS), draw(RECORDS), draw(RECORDS))
        calls.append(Call(module, f"Class{module}", ordinal, parent, *records, via, error))
    return Run(
        draw(st.sampled_from(["in-process", "hooks-off"])),
        draw(st.integers(0, 9)),
        draw(st.integers(0, 9)),
        calls,
        draw(st.dictionaries(st.sampled_from(["final", "inputs"]), RECORDS)),
        tuple(draw(st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=2))),
        draw(st.floats(0, 100)),
    )


def read_record(trace: Trace, record_id: int) -> Record:
    return tuple((site, trace.value(value_id)) for site, value_id in trace.record(record_id))


def read_calls(trace: Trace, run: RunColumns) -> list[Call]:
    calls: list[Call] = []
    seen: dict[int, int] = {}
    columns = (run.module, run.parent, run.args, run.state, run.out, run.flags)
    for module, parent, args, state, out, flag in zip(*columns, strict=True):
        ordinal = seen[module] = seen.get(module, -1) + 1
        info = trace.modules[module]
        records = (read_record(trace, args), read_record(trace, state), read_record(trace, out))
        calls.append(Call(info.path, info.cls, ordinal, parent, *records, *trace.flags[flag]))
    return calls


def read_run(trace: Trace, run: RunColumns) -> Run:
    records = {name: read_record(trace, record_id) for name, record_id in run.records.items()}
    calls = read_calls(trace, run)
    return Run(run.condition, run.position, run.process, calls, records, run.unobserved, run.seconds)


def assert_same(trace: Trace, written: Sequence[Run]) -> None:
    assert [read_run(trace, run) for run in trace.runs()] == list(written)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(written=st.lists(runs(), min_size=1, max_size=6), split=st.integers(0, 6))
def test_any_runs_come_back(tmp_path_factory: pytest.TempPathFactory, written: list[Run], split: int) -> None:
    path = tmp_path_factory.mktemp("trace") / "a.detaudit"
    with TraceWriter.create(path) as writer:
        for run in written[:split]:
            writer.add_run(run)
    with TraceWriter.append(path) as writer:
        for run in written[split:]:
            writer.add_run(run)
    with open_trace(path) as trace:
        assert trace.complete
        assert_same(trace, written)


def test_equal_ids_mean_equal_content(tmp_path: Path) -> None:
    record = (("out", Value(b"r" * 16, "float32", (2,))),)
    other = (("out", Value(b"r" * 16, "int32", (2,))),)
    calls = [Call("a", "A", k, -1, record, (), out) for k, out in enumerate((record, other, record))]
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(Run("in-process", 0, 0, calls, {"final": record}))
    with open_trace(tmp_path / "t") as trace:
        run = trace.runs()[0]
        assert run.args[0] == run.args[2] == run.out[0] == run.out[2] == run.records["final"]
        assert run.out[1] != run.out[0]
        assert trace.value(trace.record(run.out[1])[0][1]).dtype == "int32"


def test_a_run_without_calls_is_a_run(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        assert writer.add_run(Run("hooks-off", 0, 0, (), {})) == 0
        assert writer.add_run(Run("hooks-off", 1, 0, (), {})) == 1
    with open_trace(tmp_path / "t") as trace:
        assert trace.run_count == 2
        assert [len(run.module) for run in trace.runs()] == [0, 0]


def test_meta_report_and_modules(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter.create(path, {"target": "model.py", "argv": ["--x", 1, None]}) as writer:
        writer.set_meta("schlüssel", {"nested": [1.5, True]})
        writer.add_modules([ModuleInfo("a", "A", ("b", "c")), ModuleInfo("é", "E")])
        writer.add_run(Run("in-process", 0, 0, [Call("z", "Z", 0, -1, (), (), ())], {}))
        writer.store_report({"verdict": "deterministic"})
        with open_trace(path) as trace:
            assert trace.report() == {"verdict": "deterministic"}
            assert not trace.complete
    with open_trace(path) as trace:
        assert trace.complete
        assert trace.meta == {
            "target": "model.py",
            "argv": ["--x", 1, None],
            "schlüssel": {"nested": [1.5, True]},
        }
        assert trace.modules == [ModuleInfo("a", "A", ("b", "c")), ModuleInfo("é", "E"), ModuleInfo("z", "Z")]
        assert trace.report() == {"verdict": "deterministic"}


def test_a_report_is_out_of_date_after_another_run(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(Run("in-process", 0, 0, (), {}))
        writer.store_report({"runs": 1})
        writer.add_run(Run("in-process", 1, 0, (), {}))
    with open_trace(tmp_path / "t") as trace:
        assert trace.report() is None


def test_a_report_is_read_without_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        writer.add_run(Run("in-process", 0, 0, [Call("z", "Z", 0, -1, (), (), ())], {}))
        writer.store_report({"runs": 1})
    monkeypatch.setattr("detaudit.trace.columns.unpack", lambda *_: pytest.fail("decoded a run"))
    with open_trace(tmp_path / "t") as trace:
        assert trace.report() == {"runs": 1}
        with pytest.raises(pytest.fail.Exception):
            trace.runs()


def test_what_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        TraceWriter.create(tmp_path / "t", {"x": object()})
    assert list(tmp_path.iterdir()) == []
    with TraceWriter.create(tmp_path / "t") as writer, pytest.raises(TypeError):
        writer.set_meta("x", object())


def test_a_varying_site_whose_name_is_no_valid_text(tmp_path: Path) -> None:
    values = [Value(bytes([k]) * 16, "float32", (2,)) for k in range(3)]
    calls = [[Call("a", "A", 0, -1, (), (), (("out.\ud800", value),))] for value in values]
    with TraceWriter.create(tmp_path / "t") as writer:
        for position, made in enumerate(calls):
            writer.add_run(Run("in-process", position, 0, made, {"\udc00": (("\ud800", values[position]),)}))
    with open_trace(tmp_path / "t") as trace:
        assert len(trace.runs()) == 3
