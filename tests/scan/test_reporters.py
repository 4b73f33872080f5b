"""A scan shown in a terminal, as JSON and as SARIF."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from detaudit.core.errors import TraceUnreadable, TraceVersion
from detaudit.core.launches import LaunchReport
from detaudit.core.scans import MEANINGS, Atomic, FileScan, KernelScan, ScanReport, summary
from detaudit.reporters.scan_launches import render_launches
from detaudit.reporters.scan_sarif import render_sarif, to_sarif
from detaudit.reporters.scan_terminal import render_scan
from detaudit.scan.join import join

SCHEMA = Path(__file__).parents[1] / "gate" / "sarif-schema-2.1.0.json"
ADD = Atomic("accumulation", "add", "bf16x8", "global", False, False, "REDG.E.ADD.BF16x8.RN.STRONG.GPU", 2)
LOOP = Atomic("accumulation", "add", "f32", "shared", False, True, "ATOMS.CAST.SPIN")
TICKET = Atomic("ticket", "add", "u32", "global", True, False, "ATOMG.E.ADD.STRONG.GPU")
NEW = Atomic("unknown", "unknown", "unknown", "global", False, False, "ATOMG.E.NEWOP")
FLAG = Atomic("flag", "exch", "b32", "global", False, False, "ATOMG.E.EXCH.STRONG.GPU")


def kernel(short: str, *atomics: Atomic, finalize: Any = None, file: str = "/lib/moe.so") -> KernelScan:
    return KernelScan(f"_Z{short}", short, "sm_120a", file, True, atomics, finalize)


def example() -> ScanReport:
    return ScanReport(
        (
            kernel("device_kernel<GemmUniversal, Scatter>", ADD, FLAG, finalize="FINALIZE"),
            kernel("device_kernel<GemmUniversal, Scatter>", ADD, FLAG, finalize="FINALIZE"),
            kernel("histogram", LOOP),
            kernel("future", NEW),
            kernel("compact", TICKET, file="relative path/x.cubin"),
            kernel("device_kernel<GemmUniversal, LinearCombination>", FLAG, finalize="NONE"),
            kernel("plain"),
        ),
        (
            FileScan("/lib/moe.so", 2, 6),
            FileScan("relative path/x.cubin", 1, 1),
            FileScan("/lib/old.so", 1, 0, "bad"),
        ),
        ("nvdisasm 13.0 (/bin/nvdisasm)",),
    )


def shown(**options: Any) -> str:
    stream = io.StringIO()
    render_scan(example(), stream, width=100, **options)
    return stream.getvalue()


def test_the_terminal_shows_counts_suspects_and_what_was_not_read() -> None:
    text = shown()
    assert text.splitlines()[:4] == [
        "3 kernels can accumulate in an unordered way",
        "1 kernel holds an atomic instruction that is not understood",
        "1 kernel takes tickets",
        "2 kernels with no unordered accumulation found",
    ]
    assert "accumulates add.bf16x8 global" in text
    assert "accumulates add.f32 shared (swap loop)" in text
    assert "not understood: ATOMG.E.NEWOP" in text
    assert "/lib/old.so: bad" in text
    assert "evidence, not proof" in text
    assert "plain" not in text


def test_finalize_is_set_against_none() -> None:
    rows = [line.split() for line in shown().splitlines()]
    assert ["FINALIZE", "2", "2"] in rows
    assert ["NONE", "1", "0"] in rows


def test_everything_is_listed_on_request() -> None:
    assert "plain" in shown(everything=True)


def test_new_suspects() -> None:
    assert "no new suspects" in shown(new=[])
    assert "1 new suspect" in shown(new=[example().kernels[2]])


def test_an_empty_scan_says_so() -> None:
    stream = io.StringIO()
    render_scan(ScanReport(()), stream)
    assert stream.getvalue().startswith("no kernel found: nothing here holds machine code")


@pytest.mark.skipif(not SCHEMA.exists(), reason="the SARIF schema is not in this checkout")
@pytest.mark.parametrize("report", [example(), ScanReport(())])
def test_sarif_is_valid(report: ScanReport) -> None:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validators.validator_for(schema)(schema).validate(to_sarif(report))


def test_sarif_has_a_result_for_each_suspect_and_ticket_taker() -> None:
    stream = io.StringIO()
    render_sarif(example(), stream)
    (run,) = json.loads(stream.getvalue())["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    found = [(result["ruleId"], result["level"]) for result in run["results"]]
    assert found == [
        *[("unordered-accumulation", "warning")] * 3,
        ("unknown-atomic", "warning"),
        ("takes-tickets", "note"),
    ]
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in run["results"])
    uris = [
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in run["results"]
    ]
    assert (uris[0], uris[-1]) == ("file:///lib/moe.so", "relative%20path/x.cubin")
    assert "epilogue FINALIZE" in run["results"][0]["message"]["text"]
    assert run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"] == "/lib/old.so: bad"


def test_sarif_fingerprints_follow_the_kernel_and_not_the_file() -> None:
    def prints(report: ScanReport) -> list[str]:
        return [
            result["partialFingerprints"]["kernel/v1"] for result in to_sarif(report)["runs"][0]["results"]
        ]

    moved = ScanReport(tuple(dataclasses.replace(k, file="/elsewhere.so") for k in example().kernels))
    assert prints(moved) == prints(example())
    assert prints(example())[0] != prints(example())[2]


def test_json_keeps_everything() -> None:
    data = json.loads(json.dumps(example().to_json()))
    assert ScanReport.from_json(data) == example()
    assert data["summary"] == summary(example().kernels) == dict(zip(MEANINGS, (3, 1, 1, 2), strict=True))


@pytest.mark.parametrize("damage", [{"format": "else"}, {"kernels": [{}]}, {"kernels": None}, {"files": [1]}])
def test_json_that_is_no_scan_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(TraceUnreadable):
        ScanReport.from_json(example().to_json() | damage)


def test_json_of_an_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(TraceVersion, match="version 2"):
        ScanReport.from_json(example().to_json() | {"version": 2})


def launches(**options: Any) -> str:
    names = {k.name: k for k in example().kernels}
    ran = {
        "experts": dict.fromkeys(names, 1),
        "norm": {"_Zplain": 2},
        "router": {"_Zhistogram": 1},
        None: {"copy": 1},
    }
    report: LaunchReport = join(ran, example(), ("experts", "head"))
    stream = io.StringIO()
    render_launches(report, stream, width=100, **options)
    return stream.getvalue()


def test_launches_by_module() -> None:
    text = launches()
    assert text.startswith("10 launches in 5 modules; suspects ran in 2 modules\n")
    assert "experts  suspects in an origin" in text
    assert "histogram: launched once, accumulates add.f32 shared" in text
    assert "head  origin without a suspect" in text
    assert "router  risk" in text
    assert "2 more modules: no suspect ran; --all lists them" in text
    assert "no machine code found for 1 kernels: copy" in text


def test_all_launches() -> None:
    text = launches(everything=True)
    assert "norm  nothing found" in text
    assert "outside of modules  nothing found" in text
    assert "plain: launched 2 times, no unordered accumulation found" in text
