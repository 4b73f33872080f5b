"""The trace: one SQLite file that holds the runs of an audit, and its analysis. Never imports torch.

    with TraceWriter.create(path, {"target": "model.py"}) as writer:
        writer.add_run(run)
    with open_trace(path) as trace:
        trace.runs()

docs/trace-format.md describes the tables and how to read them with the sqlite3 shell.
"""

from detaudit.trace.reader import Trace, open_trace
from detaudit.trace.schema import VERSION, captures_dir
from detaudit.trace.writer import TraceWriter

__all__ = ["VERSION", "Trace", "TraceWriter", "captures_dir", "open_trace"]
