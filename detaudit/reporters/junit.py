"""The gate's result as JUnit XML, in the form that Jenkins, GitLab and GitHub actions read.

A target is a test suite, a check a test case. What is inconclusive is an error, not a skip: most readers
count a skipped case as no problem.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import IO
from xml.etree import ElementTree as xml

from detaudit.core.gating import Check, GateResult, TargetResult

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ELEMENT = {"failed": "failure", "error": "error", "inconclusive": "error"}


class JUnitReporter:
    def render(self, result: GateResult, stream: IO[str]) -> None:
        suites = [_suite(target) for target in result.targets]
        root = xml.Element("testsuites", {"name": "detaudit gate", **_totals(result.targets)})
        root.extend(suites)
        xml.indent(root)
        stream.write('<?xml version="1.0" encoding="UTF-8"?>\n')
        stream.write(xml.tostring(root, encoding="unicode") + "\n")


def clean(text: str) -> str:
    """Without what XML 1.0 cannot hold, not even escaped."""
    return _FORBIDDEN.sub("�", text)


def _suite(target: TargetResult) -> xml.Element:
    suite = xml.Element("testsuite", {"name": clean(target.name), **_totals((target,))})
    properties = xml.SubElement(suite, "properties")
    for name, value in _properties(target):
        xml.SubElement(properties, "property", {"name": name, "value": clean(value)})
    for index, check in enumerate(target.checks):
        suite.append(_case(target, check, target.seconds if index == 0 else 0.0))
    if target.notes:
        xml.SubElement(suite, "system-out").text = clean("\n".join(target.notes))
    return suite


def _case(target: TargetResult, check: Check, seconds: float) -> xml.Element:
    name = check.name if check.module is None else f"{check.name}: {check.module or '(root)'}"
    attributes = {"classname": clean(target.name), "name": clean(name), "file": clean(target.file)}
    case = xml.Element("testcase", {**attributes, "time": f"{seconds:.3f}"})
    if check.status == "passed":
        xml.SubElement(case, "system-out").text = clean(check.message)
    else:
        kind = f"detaudit.{check.status}"
        problem = {"message": clean(check.message), "type": kind}
        xml.SubElement(case, _ELEMENT[check.status], problem).text = clean(check.message)
    return case


def _totals(targets: tuple[TargetResult, ...]) -> dict[str, str]:
    counts = Counter(_ELEMENT.get(check.status, "") for target in targets for check in target.checks)
    return {
        "tests": str(counts.total()),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": "0",
        "time": f"{sum(target.seconds for target in targets):.3f}",
    }


def _properties(target: TargetResult) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = [("status", target.status)]
    if target.report is not None:
        report = target.report
        found += [("verdict", report.verdict), ("runs", str(report.runs))]
        found += [("rate.high", f"{report.rate.high:.6g}")]
    if target.baseline is not None:
        found += [("baseline", target.baseline.comparison), ("environment", target.baseline.environment)]
    if target.trace:
        found.append(("trace", target.trace))
    return found
