"""Run as a script: records runs until something ends it. ``crash_writer.py PATH MODE``.

Prints ``run K`` when run K is about to be recorded. MODE says what happens in run 7 (the seventh):
``wait`` sleeps in the target, ``commit`` stops inside the transaction with the run already inserted,
``spill`` the same with pages already written into the file, ``raise`` and ``exit`` end the interpreter.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import xxhash

from detaudit.core.recording import Call, Run, Value
from detaudit.trace import TraceWriter


def make_run(index: int, calls: int = 20) -> Run:
    made = []
    for call in range(calls):
        leaves = xxhash.xxh3_64_digest(f"{call} {index}".encode()) * 4
        value = Value(xxhash.xxh3_128_digest(leaves), "float32", (4, 64), leaves, bytes(300))
        made.append(Call(f"layers.{call}", "Linear", 0, -1, (), (), (("out", value),)))
    return Run("in-process", index, 0, made, {"final": made[-1].out})


def say(text: str) -> None:
    print(text, flush=True)


def hang() -> None:
    say("hanging")
    time.sleep(600)


def main(path: Path, mode: str) -> None:
    writer = TraceWriter.create(path, {"target": "crash"})
    for index in range(6):
        say(f"run {index + 1}")
        writer.add_run(make_run(index))
    say("run 7")
    if mode == "raise":
        raise RuntimeError("the target raised in run 7")
    if mode == "exit":
        sys.exit(3)
    if mode == "wait":
        hang()
    connection = writer._connection
    if mode == "spill":
        # A cache of one page makes SQLite write into the file before the commit.
        connection.execute("PRAGMA cache_size = 1")
    writer._caught_up = lambda: Hanging(writer)  # type: ignore[assignment, method-assign, return-value]
    writer.add_run(make_run(6, calls=2000))


class Hanging:
    """Stands for the encoder: inserts the run, then does not come back."""

    def __init__(self, writer: TraceWriter) -> None:
        self._encoder = TraceWriter._caught_up(writer)

    def add(self, run: Run) -> int:
        index = self._encoder.add(run)
        hang()
        return index


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
