"""docs/trace-format.md is true: its queries run, its Python runs, its numbers are those of the code."""

from __future__ import annotations

import re
import sqlite3
import struct
import zlib
from contextlib import closing
from pathlib import Path

import pytest

from detaudit.core.recording import Run
from detaudit.trace import TraceWriter, encoding, open_trace, schema
from tests.trace.crash_writer import make_run
from tests.trace.test_crash import ROOT

PAGE = (ROOT / "docs" / "trace-format.md").read_text()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "model.detaudit"
    with TraceWriter.create(path, {"target": "model.py"}) as writer:
        for index in (0, 0, 1):
            writer.add_run(make_run(index))
        writer.store_report({"verdict": "nondeterministic", "runs_differing": 1})
    return path


def queries() -> list[str]:
    blocks = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    return [query for block in blocks for query in block.split(";") if query.strip()]


def test_the_queries_answer(recorded: Path) -> None:
    with closing(sqlite3.connect(recorded)) as connection:
        answers = [connection.execute(query).fetchall() for query in queries()]
    assert len(answers) == 8
    assert all(answers)
    assert answers[0][0][0] == schema.FORMAT
    assert [row[4] for row in answers[1]] == [20, 20, 20]
    assert answers[3] == [("nondeterministic", 1)]
    assert len(answers[4]) == 20
    assert answers[4][0] == ("layers.0", 0, "out", "out", 2, "float32", "4,64")
    with open_trace(recorded) as trace:
        ((site, value_id),) = trace.record(1)
        assert answers[5] == [(site, "float32", "4,64", trace.value(value_id).root.hex())]
        assert answers[6][0][0] == 41


def test_the_python_runs(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recorded.parent)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("0 in-process 20 calls\n1 in-process 20 calls\n")


def test_the_columns_are_as_described(recorded: Path) -> None:
    """Decoded here by the words of the page alone."""
    with closing(sqlite3.connect(recorded)) as connection:
        rows = connection.execute("SELECT base, module, out FROM run ORDER BY id").fetchall()
    assert [row[0] for row in rows] == [None, 0, 0]
    assert rows[1][1:] == (b"", b"")
    columns = []
    for column in (rows[0][2], rows[2][2]):
        stream = zlib.decompress(column[1:])
        count = len(stream) // 4
        columns.append(
            struct.unpack(
                f"<{count}i", bytes(stream[place * count + k] for k in range(count) for place in range(4))
            )
        )
    tag = rows[2][2][:1]
    first = [sum(columns[0][: k + 1]) for k in range(20)]
    last = [sum(columns[1][: k + 1]) if tag == b"d" else columns[1][k] ^ first[k] for k in range(20)]
    with open_trace(recorded) as trace:
        assert list(trace.runs()[0].out) == first
        assert list(trace.runs()[2].out) == last


def test_the_numbers_are_those_of_the_code(recorded: Path) -> None:
    assert f"0x{schema.APPLICATION_ID:x}" in PAGE
    assert schema.APPLICATION_ID.to_bytes(4, "big") == b"dtAu"
    assert recorded.read_bytes()[68:72] == b"dtAu"
    assert PAGE.count(f"\n| {schema.VERSION} | ") == 1
    assert f"at\nmost {encoding.KEPT_DIGESTS} distinct digests" in PAGE
    assert f"a budget of {encoding.RAW_BUDGET >> 20} MiB" in PAGE
    assert f"up to {encoding.RAW_SCALAR_BYTES} bytes" in PAGE
    for table in re.findall(r"CREATE TABLE (\w+)", schema.TABLES):
        assert f"| `{table}` | " in PAGE


def test_durability_is_as_described(tmp_path: Path) -> None:
    with TraceWriter.create(tmp_path / "t") as writer:
        pragmas = ("journal_mode", "synchronous")
        values = [writer._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
        assert values == ["delete", 2]
        writer.add_run(Run("in-process", 0, 0, (), {}))
