from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from detaudit.core.records import KernelReport, Origin, Rate, Report, VariantResult
from detaudit.reporters import wording


def origin(**changes: object) -> Origin:
    values: dict[str, object] = {
        "module": "m",
        "cls": "M",
        "call": 0,
        "part": "module",
        "after": None,
        "sites": ("out",),
        "runs_differing": 1,
    }
    return Origin(**(values | changes))  # type: ignore[arg-type]


def test_neighbouring_rows_are_joined() -> None:
    assert wording.row_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert wording.row_ranges([]) == ""
    assert wording.row_ranges([0, 2, 4, 6], limit=2) == "0, 2, ..."


@given(st.sets(st.integers(0, 300)))
def test_row_ranges_name_exactly_the_rows(rows: set[int]) -> None:
    text = wording.row_ranges(sorted(rows), limit=1000)
    named: set[int] = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == rows


@given(st.floats(1e-9, 1.0))
def test_a_bound_is_never_rounded_down(share: float) -> None:
    shown = float(wording.upper_percent(share).rstrip("%"))
    assert shown >= 100 * share - 1e-8
    assert shown <= 100 * share * 2 + 1e-8


def test_bounds_read_as_documented() -> None:
    assert wording.upper_percent(1 - 0.05 ** (1 / 300)) == "1.0%"
    assert wording.upper_percent(1 - 0.05 ** (1 / 19)) == "14.6%"
    assert wording.upper_percent(1 - 0.05 ** (1 / 10_000)) == "0.03%"
    assert wording.upper_percent(1.0) == "100.0%"
    assert wording.upper_percent(0.0) == "0.0%"


def test_rows_of_an_origin() -> None:
    assert wording.rows_of(origin(rows=(0,), rows_differing=1, rows_total=1)) == "its only row"
    assert wording.rows_of(origin(rows=(0, 1), rows_differing=2, rows_total=2)) == "all 2 rows"
    assert wording.rows_of(origin(rows=(3,), rows_differing=1, rows_total=1024)) == "row 3 of 1,024"
    assert wording.rows_of(origin(rows=(3, 4), rows_differing=9, rows_total=1024)) == "rows 3-4, ... of 1,024"
    assert wording.rows_of(origin()) == ""


def test_sizes() -> None:
    assert wording.size_of(3, 1.2e-7) == "up to 1.2e-07 (3 ULP)"
    assert wording.size_of(None, 0.5) == "up to 0.5"
    assert wording.size_of(None, None) == ""


def test_no_difference_is_a_bound_with_its_number_of_comparisons() -> None:
    report = Report("deterministic", 300, 0, 1, 1.0, Rate(0.0, 0.0, 1 - 0.05 ** (1 / 299), 299))
    assert wording.rate_line(report) == (
        "no difference in 299 comparisons; at most 1.0% of runs differ (95% one-sided), "
        "under these conditions"
    )


def test_next_command_quotes_what_a_shell_would_split() -> None:
    report = Report("deterministic", 2, 0, 1, 1.0, Rate(0.0, 0.0, 0.95, 1), target="my model.py")
    assert wording.next_commands(report) == ["detaudit run 'my model.py' --runs 300"]
    again = dataclasses.replace(report, arguments=("--exclude", "layers.*", "--", "--steps", "3"))
    assert wording.next_commands(again) == [
        "detaudit run 'my model.py' --runs 300 --exclude 'layers.*' -- --steps 3"
    ]


def test_a_repro_is_offered_where_a_call_can_have_been_captured() -> None:
    rate = Rate(1.0, 0.2, 1.0, 1)
    varying = Report(
        "nondeterministic",
        2,
        1,
        2,
        0.5,
        rate,
        (origin(operator="aten.index_put_.default"),),
        trace="t.detaudit",
    )
    assert wording.next_commands(varying)[0] == "detaudit repro t.detaudit"
    unknown = dataclasses.replace(varying, origins=(origin(),))
    assert not any("repro" in command for command in wording.next_commands(unknown))


def test_an_inconclusive_report_does_not_call_outputs_the_same() -> None:
    report = Report("inconclusive", 5, 0, 1, 1.0, Rate(0.0, 0.0, 0.6, 4))
    assert wording.outputs_line(report) == "1 distinct final output in 5 runs"


def test_ulp_counts_are_grouped_behind_the_first_ranges() -> None:
    histogram = {"0": 5, "1": 1000, "2": 40, "4": 7, "8": 2, "64": 1, "nan": 3}
    assert wording.ulp_counts(histogram) == (
        "1,000 by 1, 40 by 2 to 3, 7 by 4 to 7, 3 by 8 or more, 5 equal in value, 3 NaN on one side"
    )
    assert wording.ulp_counts({"1": 1}) == "1 by 1"


def test_an_origin_of_another_condition_has_that_conditions_total() -> None:
    report = Report("nondeterministic", 2, 0, 1, 1.0, Rate(0.0, 0.0, 0.95, 1))
    behind = origin(runs_differing=5, condition="held-fixed-1", comparisons=7)
    assert wording.origin_rate(behind, report) == "5 of 7 runs"
    assert any("held fixed" in line for line in wording.origin_details(behind))
    assert wording.origin_rate(origin(runs_differing=1), report) == "1 of 1 run"
    assert wording.calls_of(origin(call=2, calls=4)) == "call 2 and 3 more of its calls"


def test_what_the_reference_kernel_cannot_show_is_said() -> None:
    variant = VariantResult("atomic", {}, None, 300, 1, 2, 0.01, 1, 0.1, None, 1.0, 1.0)
    own = KernelReport("case", None, "reference", "confirmed", "", None, (variant,))
    assert "nothing is shown of any library's GPU kernel" in str(wording.reach(own))
    other = KernelReport("case", None, "flashinfer-cutlass", "confirmed", "", None, (variant,))
    assert wording.reach(other) is None
