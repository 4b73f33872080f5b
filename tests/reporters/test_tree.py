from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from detaudit.core.records import Origin, Rate, Report
from detaudit.reporters.tree import module_tree
from tests.golden.reports import modules


def report(origins: list[str], known: list[dict[str, str]]) -> Report:
    found = tuple(Origin(path, "X", 0, "module", None, ("out",), 1) for path in origins)
    return Report(
        "nondeterministic", 2, 1, 2, 0.5, Rate(1.0, 0.1, 1.0, 1), found, coverage={"modules": known}
    )


def test_origin_is_marked_and_its_siblings_are_shown() -> None:
    lines = module_tree(report(["layers.1.mlp.experts"], modules(2)))
    assert [(line.depth, line.path) for line in lines if line.origin] == [(4, "layers.1.mlp.experts")]
    assert "layers.1.mlp.gate" in [line.path for line in lines]
    assert "layers.0.self_attn" not in [line.path for line in lines]


def test_alike_siblings_are_folded_into_one_line() -> None:
    lines = module_tree(report(["layers.40.mlp"], modules(80)))
    assert [line.label for line in lines if line.path is None] == ["0 to 39", "41 to 79", "q_proj to o_proj"][
        :2
    ]
    assert len(lines) < 15


def test_origin_unknown_to_the_coverage_is_still_shown() -> None:
    lines = module_tree(report(["made.later"], []))
    assert [line.label for line in lines] == ["", "made", "later"]


def test_no_origin_no_tree() -> None:
    assert module_tree(Report("deterministic", 2, 0, 1, 1.0, Rate(0.0, 0.0, 0.95, 1))) == []


@given(st.data(), st.integers(1, 12))
def test_every_module_is_shown_or_counted_once(data: st.DataObject, layers: int) -> None:
    known = modules(layers)
    paths = [entry["path"] for entry in known]
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4, unique=True))
    lines = module_tree(report(chosen, known))
    assert sorted(line.path or "" for line in lines if line.origin) == sorted(chosen)
    assert sum((line.path is not None) + line.hidden for line in lines) == len(known)
