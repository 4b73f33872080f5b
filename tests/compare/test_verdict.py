"""Rules 5.1 and 5.7: the verdict in its order, and the figures beside it."""

from __future__ import annotations

from detaudit.compare import analyze
from detaudit.core.records import Report
from detaudit.core.stats import upper_bound
from tests.compare.builder import MemoryTrace, node


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_equal_runs_are_deterministic_with_their_bound() -> None:
    trace = MemoryTrace(target="model.py", trace="t.detaudit", environment={"torch": "2.13"})
    for _ in range(20):
        trace.add([node("", "x", "y", node("layer", "x", "y"))], inputs="x", final="y")
    report = analyze(trace)
    assert (report.verdict, report.exit_code) == ("deterministic", 0)
    assert (report.runs, report.runs_differing, report.distinct_outputs) == (20, 0, 1)
    assert report.rate.high == upper_bound(19)
    assert (report.target, report.trace, report.environment) == ("model.py", "t.detaudit", {"torch": "2.13"})
    assert report.coverage["calls"] == report.coverage["modules_called"] == 2
    assert not report.origins
    assert not report.findings
    assert Report.from_json(report.to_json()) == report
