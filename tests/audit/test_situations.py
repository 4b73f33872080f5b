"""Design section 5.9: each situation with a planted race, and its control without one. No false origins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.audit.harness import modules, run_audit
from tests.audit.situations import SITUATIONS, Copying, build, inputs

SOURCE = """
def build_model():
    return build({name!r}, {racing})
"""


@pytest.mark.usefixtures("racy")
@pytest.mark.parametrize("name", SITUATIONS)
def test_the_race_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    report = run_audit(tmp_path, SOURCE.format(name=name, racing=True))
    assert report.verdict == "nondeterministic"
    assert set(modules(report)) == {SITUATIONS[name][1]}
    assert report.origins[0].max_ulp, report.origins[0].numbers_reason
    assert report.origins[0].operator == "aten.index_put_.default"
    gone = SITUATIONS[name][0] is Copying  # the copy died with its run: there is nothing to rerun
    assert report.origins[0].isolated is (None if gone else True)


@pytest.mark.parametrize("name", SITUATIONS)
def test_without_the_race_nothing_is_accused(name: str, tmp_path: Path) -> None:
    report = run_audit(tmp_path, SOURCE.format(name=name, racing=False))
    assert (report.verdict, report.origins) == ("deterministic", ())
    assert report.rate.comparisons == 5


def test_dropout_and_the_generator_vary_when_nobody_puts_them_back() -> None:
    model = build("dropout and a private generator", False)
    with torch.no_grad():
        assert not torch.equal(model(inputs()), model(inputs()))
