from __future__ import annotations

from detaudit.core.records import Rate, Report
from detaudit.reporters import evidence


def test_unobserved_entries_in_either_form() -> None:
    entries = [["a.b", "out", "sparse"], {"module": "", "site": "", "reason": "compiled"}, "free text"]
    assert evidence.unobserved({"unobserved": entries}) == [
        "a.b out: sparse",
        "(root): compiled",
        "free text",
    ]
    assert evidence.unobserved({}) == []


def test_what_was_put_back_and_what_was_not() -> None:
    values = {
        "generators": {"python": "put back", "sampler": "not put back: it is opaque"},
        "buffers": {
            "buffers": 1024,
            "bytes_on_host": 0,
            "modules_eval": 3,
            "not_put_back": {"kv": "too large"},
        },
        "inputs": "made afresh",
    }
    report = Report("inconclusive", 1, 0, 1, 1.0, Rate(None, 0.0, 1.0, 0), restored=values)
    done, missing = evidence.restored(report)
    assert done == [
        "generators: python",
        "buffers: 1,024 of the model's",
        "left as they are: 3 modules in eval mode",
        "inputs: made afresh",
    ]
    assert missing == ["sampler: it is opaque", "kv: too large"]


def test_observer_control_in_words() -> None:
    observer = {"runs_on": 20, "runs_off": 4, "differing_on": 18, "differing_off": 0, "p_value": 0.0123}
    lines = evidence.observer_lines(observer | {"agree": False})
    assert lines[0] == "hooks on: 20 runs, 18 of 19 comparisons differ"
    assert lines[2] == "recording changes the outcome (Fisher's exact test: p = 0.012)"
    assert evidence.observer_lines(observer | {"agree": True})[2].startswith(
        "recording changed nothing that shows"
    )
    assert evidence.observer_lines({}) == []


def test_an_option_that_leaves_out_every_module_is_told() -> None:
    coverage = {"calls": 0, "modules_called": 0, "excluded": ["", "head"]}
    report = Report("inconclusive", 1, 0, 1, 1.0, Rate(None, 0.0, 1.0, 0), coverage=coverage)
    assert evidence.coverage_lines(report)[0] == "no call was recorded: only final outputs were compared"


def test_coverage_in_words() -> None:
    coverage = {
        "calls": 1200,
        "modules_called": 40,
        "excluded": ["", "head"],
        "history": {"positions": 20, "differing": 0},
        "unmatched": [{}, {}],
    }
    report = Report("inconclusive", 1, 0, 1, 1.0, Rate(None, 0.0, 1.0, 0), coverage=coverage)
    lines = evidence.coverage_lines(report)
    assert lines[:2] == ["1,200 calls of 40 modules in each run", "left out on request: (root), head"]
    assert lines[2].endswith("the same sequence of runs: every run equals its counterpart")
    assert "2 calls" in lines[3]
