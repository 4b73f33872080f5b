"""What is stored once, what later digests of a site keep, and several writers on one trace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from detaudit.core.geometry import root_of
from detaudit.core.recording import Call, Run, Value
from detaudit.trace import Trace, TraceWriter, encoding, interning, open_trace
from tests.trace.crash_writer import make_run
from tests.trace.test_crash import ROOT
from tests.trace.test_round_trip import read_run

ROWS = 6
SHAPE = (2, 3, 64)


def value(*row_contents: int, raw: bytes | None = None) -> Value:
    leaves = b"".join(xxhash.xxh3_64_digest(str(content).encode())[::-1] for content in row_contents)
    return Value(root_of("float32", SHAPE, leaves), "float32", SHAPE, leaves, raw)


def only_row(row: int, content: int) -> Value:
    """A tensor that differs from ``value(0, 0, ...)`` in one row."""
    return value(*(content if index == row else 0 for index in range(ROWS)), raw=bytes([row, content % 256]))


def one_call(output: Value, module: str = "m") -> Run:
    return Run("in-process", 0, 0, [Call(module, "M", 0, -1, (), (), (("out", output),))], {})


def out_ids(trace: Trace) -> list[int]:
    return [trace.record(run.out[0])[0][1] for run in trace.runs()]


def record_all(path: Path, outputs: Sequence[Value]) -> None:
    with TraceWriter.create(path) as writer:
        for output in outputs:
            writer.add_run(one_call(output))


def count(trace: Trace, table: str) -> int:
    return int(trace._connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_equal_runs_add_nothing_but_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter.create(path) as writer:
        writer.add_run(make_run(0))
        with open_trace(path) as trace:
            before = [count(trace, table) for table in ("value", "record", "layout", "type", "module")]
        for _ in range(5):
            writer.add_run(make_run(0))
    with open_trace(path) as trace:
        assert [count(trace, table) for table in ("value", "record", "layout", "type", "module")] == before
        # 20 values and their records, one empty record, and the final output, which is one of them.
        assert before[:2] == [20, 21]
        first, *later = trace.runs()
        assert all(run.out is first.out and run.module is first.module for run in later)


def test_size_where_digests_repeat(tmp_path: Path) -> None:
    """The design's limit is 24 bytes per call and run; a column that repeats takes none."""
    path = tmp_path / "t"
    run = make_run(0, calls=2000)
    with TraceWriter.create(path) as writer:
        writer.add_run(run)
        before = path.stat().st_size
        for _ in range(50):
            writer.add_run(run)
    assert (path.stat().st_size - before) / (50 * 2000) < 0.5


def test_first_eight_digests_keep_leaves_and_later_ones_rows(tmp_path: Path) -> None:
    outputs = [value(*[0] * ROWS)] + [only_row(k % ROWS, k) for k in range(1, 12)]
    record_all(tmp_path / "t", outputs)
    with open_trace(tmp_path / "t") as trace:
        ids = out_ids(trace)
        kept = [trace.value(value_id) for value_id in ids]
        assert kept == outputs
        assert [item.leaves for item in kept] == [item.leaves for item in outputs[:8]] + [None] * 4
        assert [item.raw for item in kept] == [item.raw for item in outputs[:8]] + [None] * 4
        for k in range(1, 12):
            assert trace.rows_differing(ids[0], ids[k]) == (k % ROWS,)
            assert trace.rows_differing(ids[k], ids[0]) == (k % ROWS,)
        assert trace.rows_differing(ids[2], ids[3]) == (2, 3)
        assert trace.rows_differing(ids[2], ids[9]) is None
        assert trace.rows_differing(ids[9], ids[10]) is None
        assert trace.rows_differing(ids[9], ids[9]) == ()


def test_a_site_that_first_differs_late_keeps_its_leaves(tmp_path: Path) -> None:
    outputs = [value(*[0] * ROWS)] * 30 + [only_row(4, 1), only_row(5, 1)]
    record_all(tmp_path / "t", outputs)
    with open_trace(tmp_path / "t") as trace:
        ids = out_ids(trace)
        assert len(set(ids)) == 3
        assert trace.rows_differing(ids[-2], ids[-1]) == (4, 5)


def test_the_count_of_a_site_survives_its_process(tmp_path: Path) -> None:
    """Script mode appends every run from a fresh process."""
    path = tmp_path / "t"
    outputs = [value(*[0] * ROWS)] + [only_row(k % ROWS, k) for k in range(1, 12)]
    with TraceWriter.create(path):
        pass
    for output in outputs:
        with TraceWriter.append(path) as writer:
            writer.add_run(one_call(output))
    with open_trace(path) as trace:
        ids = out_ids(trace)
        assert [trace.value(value_id).leaves is None for value_id in ids] == [False] * 8 + [True] * 4
        assert trace.rows_differing(ids[0], ids[11]) == (5,)


def test_each_structure_of_calls_has_its_own_sites(tmp_path: Path) -> None:
    """More structures than bases are kept: new sites keep leaves, and are counted all the same."""
    with TraceWriter.create(tmp_path / "t") as writer:
        for content in range(12):
            for module in range(7):
                writer.add_run(one_call(only_row(module % ROWS, 100 * (module + 1) + content), f"m{module}"))
    with open_trace(tmp_path / "t") as trace:
        ids = out_ids(trace)
        for module in range(7):
            site = ids[module::7]
            assert [trace.value(value_id).leaves is None for value_id in site] == [False] * 8 + [True] * 4
            assert trace.rows_differing(site[0], site[11]) == (module % ROWS,)


def test_another_shape_or_dtype_has_no_rows(tmp_path: Path) -> None:
    scalars = [Value(bytes([k]) * 16, "python.int", (), None, str(k).encode()) for k in range(12)]
    record_all(tmp_path / "t", [value(*[0] * ROWS), *scalars])
    with open_trace(tmp_path / "t") as trace:
        ids = out_ids(trace)
        assert {trace.rows_differing(ids[0], other) for other in ids[1:]} == {None}
        assert trace.value(ids[3]).raw == b"2"


def test_raw_bytes_have_a_budget_for_the_whole_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "RAW_BUDGET", 1000)
    path = tmp_path / "t"
    for index in range(4):
        raw = bytes([index]) * 400
        opener = TraceWriter.append if index else TraceWriter.create
        with opener(path) as writer:
            writer.add_run(one_call(Value(xxhash.xxh3_128_digest(raw), "uint8", (400,), b"l" * 8, raw)))
    with open_trace(path) as trace:
        assert [trace.value(value_id).raw is None for value_id in out_ids(trace)] == [
            False,
            False,
            True,
            True,
        ]


@pytest.mark.parametrize("limit", [1, 7, 30])
def test_maps_that_overflow_ask_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(interning, "MAP_LIMIT", limit)
    runs = [make_run(index % 3) for index in range(6)]
    with TraceWriter.create(tmp_path / "t") as writer:
        for run in runs[:4]:
            writer.add_run(run)
    with TraceWriter.append(tmp_path / "t") as writer:
        for run in runs[4:]:
            writer.add_run(run)
    with open_trace(tmp_path / "t") as trace:
        assert [read_run(trace, run) for run in trace.runs()] == runs
        assert count(trace, "value") == 60
        assert trace.runs()[0].out == trace.runs()[3].out


def test_two_writers_take_turns(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as one, TraceWriter.append(tmp_path / "t") as two:
        for index in range(4):
            assert (one, two)[index % 2].add_run(make_run(index // 2)) == index
        two.close()
        with open_trace(tmp_path / "t") as trace:
            assert not trace.complete
    with open_trace(tmp_path / "t") as trace:
        assert trace.complete
        assert count(trace, "value") == 40
        assert trace.runs()[0].out == trace.runs()[1].out


def test_two_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter.create(path):
        pass
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from detaudit.trace import TraceWriter
from tests.trace.crash_writer import make_run
with TraceWriter.append({str(path)!r}) as writer:
    for index in range(15):
        writer.add_run(make_run(index))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    with open_trace(path) as trace:
        assert trace.complete
        assert trace.run_count == 45
        assert count(trace, "value") == 15 * 20
        outs = [bytes(run.out) for run in trace.runs()]
        assert len(set(outs)) == 15
        written = [read_run(trace, run) for run in trace.runs()]
        assert all(written.count(make_run(index)) == 3 for index in range(15))
