"""The gate's result as SARIF 2.1.0 (OASIS), for code scanning: every check that did not pass is a result.

An error of an audit is a notification of the tool, since it says nothing about the code.
"""

from __future__ import annotations

import hashlib
from typing import IO, Any
from urllib.parse import quote

from detaudit import __version__
from detaudit.core.gating import Check, CheckName, GateResult, TargetResult
from detaudit.reporters.json import write_json

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
RULES: dict[CheckName, tuple[str, str]] = {
    "evidence": ("NothingShown", "Something was compared, on identical inputs."),
    "determinism": ("Nondeterministic", "Modules give the same bits for the same inputs."),
    "bound": ("BoundNotShown", "Enough runs were compared for the bound that the policy asks for."),
    "conditions": ("ConditionNotCompared", "Every condition that the policy names was compared."),
    "devices": ("DeviceMissing", "It was shown on the devices that the policy names."),
    "kernels": ("KernelNotShown", "Kernels run alone are stable, against a control that could differ."),
    "budget": ("OverBudget", "The audits ended within the time budget."),
    "baseline": ("OtherBits", "The bits are those of the lock file."),
    "suspects": ("NewSuspects", "No kernel that can accumulate in an unordered way was added."),
}
_LEVEL = {"failed": "error", "error": "error", "inconclusive": "warning"}


class SarifReporter:
    def render(self, result: GateResult, stream: IO[str]) -> None:
        log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [_run(result)]}
        write_json(log, stream)


def _run(result: GateResult) -> dict[str, Any]:
    rules = list(RULES)
    results = [
        _result(target, check, rules.index(check.name))
        for target in result.targets
        for check in target.checks
        if check.status != "passed" and check.name in RULES
    ]
    return {
        "tool": {"driver": _driver()},
        "automationDetails": {"id": "detaudit/gate/"},
        "invocations": [_invocation(result)],
        "results": results,
        "columnKind": "unicodeCodePoints",
    }


def _driver() -> dict[str, Any]:
    rules = [
        {
            "id": f"detaudit/{name}",
            "name": title,
            "shortDescription": {"text": text},
            "help": {"text": f"docs/gate.md explains the check '{name}' and what to do."},
        }
        for name, (title, text) in RULES.items()
    ]
    return {"name": "detaudit", "semanticVersion": __version__, "rules": rules}


def _invocation(result: GateResult) -> dict[str, Any]:
    notifications = [
        {"level": "error", "message": {"text": check.message}, "locations": [_location(target, None)]}
        for target in result.targets
        for check in target.checks
        if check.name == "audit" and check.status != "passed"
    ]
    return {
        "executionSuccessful": not notifications,
        "exitCode": result.exit_code,
        "toolExecutionNotifications": notifications,
    }


def _result(target: TargetResult, check: Check, rule: int) -> dict[str, Any]:
    identity = f"{target.name}\0{check.name}\0{check.module}"
    return {
        "ruleId": f"detaudit/{check.name}",
        "ruleIndex": rule,
        "level": _LEVEL[check.status],
        "message": {"text": check.message},
        "locations": [_location(target, check.module)],
        "partialFingerprints": {
            "detaudit/v1": hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        },
    }


def _location(target: TargetResult, module: str | None) -> dict[str, Any]:
    location: dict[str, Any] = {
        "physicalLocation": {
            # A path may hold a blank, a colon or a percent sign; SARIF wants a relative URI.
            "artifactLocation": {"uri": quote(target.file), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": 1},
        }
    }
    if target.file.startswith(("/", "..")):
        del location["physicalLocation"]["artifactLocation"]["uriBaseId"]
    if module is not None:
        name = module or "(root)"
        location["logicalLocations"] = [
            {"name": name.rpartition(".")[2], "fullyQualifiedName": name, "kind": "module"}
        ]
    return location
