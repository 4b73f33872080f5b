"""The pytest plugin, in pytest processes of its own: marker, fixture, function, failures, xdist."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.programs import ROOT, python

pytest_plugins = ["pytester"]

PRELUDE = """
import detaudit.core.errors, pytest, torch
from detaudit.pytest_plugin import assert_deterministic
from tests.support import HIDDEN, TOKENS, Stack

torch.set_num_threads(4)
x = torch.randn(TOKENS, HIDDEN)

@pytest.fixture
def racing(): return Stack().eval()

@pytest.fixture
def stable(): return Stack(racing=()).eval()
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Without entry points: the plugin may be installed in this environment, or not yet."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("CI", "BUILD_NUMBER"):  # under which pytest repeats whole messages in its summary
        monkeypatch.delenv(name, raising=False)
    return pytester


def run(inner: pytest.Pytester, source: str, *options: str) -> pytest.RunResult:
    inner.makepyfile(PRELUDE + source)
    basetemp = f"--basetemp={inner.path / 'kept'}"
    return inner.runpytest_subprocess(
        "-p", "detaudit.pytest_plugin", "--strict-markers", basetemp, *options, timeout=180
    )


def test_the_entry_point_and_a_light_start() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"detaudit": "detaudit.pytest_plugin"}
    done = python("import sys, detaudit.pytest_plugin; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("racy")
def test_a_race_fails_with_its_origin_and_is_kept(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
def test_fixture(assert_deterministic, racing):
    assert_deterministic(racing, x, runs=4)

def test_function(racing):
    assert_deterministic(racing, x, runs=4, conditions=["in-process"])

@pytest.mark.deterministic(runs=4)
def test_marker(racing):
    racing(x)
""",
    )
    result.assert_outcomes(failed=3)
    output = result.stdout.str()
    assert len(re.findall(r"origin: (racing\.)?layers\.0\.mlp\.experts \(Experts\)", output)) == 3
    assert "operator: aten.index_put_.default" in output
    traces = sorted(Path(text) for text in re.findall(r"trace: (\S+)", output))
    assert [trace.parent.name for trace in traces] == ["test_fixture0", "test_function0", "test_marker0"]
    for trace in traces:
        assert trace.is_file()
        assert list(Path(f"{trace}.d").glob("operator-*/tensors.safetensors"))
        assert f"detaudit repro {trace}" in output


def test_what_is_stable_passes_and_leaves_nothing(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
def test_function(stable, tmp_path):
    report = assert_deterministic(stable, x, runs=3)
    assert (report.verdict, report.rate.comparisons) == ("deterministic", 2)
    assert list(tmp_path.iterdir()) == []

def test_folder(stable, tmp_path):
    assert_deterministic(stable, x, runs=2, folder=str(tmp_path))

def test_no_folder(stable):
    with pytest.raises(detaudit.core.errors.UsageError, match="folder is 3; give a path"):
        assert_deterministic(stable, x, folder=3)

def test_keywords(assert_deterministic):
    assert_deterministic(lambda a, *, b: a + b, torch.ones(2), b=torch.rand(2), runs=2)

@pytest.mark.deterministic(runs=3)
def test_marker(stable, tmp_path):
    stable(x)

class TestClass:
    @pytest.mark.deterministic
    @pytest.mark.parametrize("size", [1, 2])
    def test_method(self, size):
        torch.nn.Linear(size, 1)(torch.ones(size))
""",
    )
    result.assert_outcomes(passed=7)
    assert not list(inner.path.joinpath("kept").rglob("*.detaudit*"))


def test_nothing_compared_is_not_a_pass_and_own_failures_stay(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
def test_returns_nothing():
    assert_deterministic(lambda: None, runs=3)

@pytest.mark.deterministic
def test_calls_no_module():
    torch.ones(3)

@pytest.mark.deterministic(runs=1)
def test_one_run(stable):
    stable(x)

def test_inputs_differ():
    assert_deterministic(lambda x: x, torch.ones(1), runs=1)

@pytest.mark.deterministic
def test_own_assertion():
    left = 1
    assert left == 2

@pytest.mark.deterministic
def test_skips():
    pytest.skip("not today")

def test_unknown_condition():
    assert_deterministic(lambda: torch.ones(1), conditions=["overnight"])
""",
    )
    result.assert_outcomes(failed=6, skipped=1)
    output = result.stdout.str()
    assert output.count("nothing was observed") >= 2
    assert "nothing was compared: 1 run" in output
    assert "assert 1 == 2" in output
    assert "there is no condition 'overnight'" in output
    assert "TargetRaised" not in output


def test_a_marked_test_that_was_not_audited_fails(inner: pytest.Pytester) -> None:
    inner.makeconftest(
        """
import asyncio, inspect, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""
    )
    result = run(
        inner,
        """
import unittest

@pytest.mark.deterministic
class TestOld(unittest.TestCase):
    def test_method(self): pass

    def test_asserts_itself(self): assert_deterministic(Stack(racing=()).eval(), x, runs=2)

    def test_own_failure(self): self.assertEqual(1, 2)

    def test_skips(self): self.skipTest("not today")

@pytest.mark.deterministic
async def test_async(): pass
""",
    )
    result.assert_outcomes(failed=3, passed=1, skipped=1)
    lines = result.stdout.lines
    assert sum(line.startswith("not audited: the marker 'deterministic'") for line in lines) == 2
    result.stdout.fnmatch_lines(["*AssertionError: 1 != 2"])


def test_options_of_the_marker_that_cannot_be_meant(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
@pytest.mark.deterministic(bogus=3)
def test_unknown(stable): stable(x)

@pytest.mark.deterministic(runs=2.5)
def test_wrong(stable): stable(x)
""",
    )
    result.assert_outcomes(failed=2)
    begin = "@pytest.mark.deterministic: "
    assert f"{begin}got an unexpected keyword argument 'bogus'; its options are runs and conditions" in (
        result.stdout.lines
    )
    assert f"{begin}runs is 2.5; give a whole number, at least 1" in result.stdout.lines
    assert "Traceback" not in result.stdout.str()
    assert "pytest_plugin.py" not in result.stdout.str()


def test_fixtures_are_copied_only_where_they_hold_data(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
import os, types

@pytest.fixture
def seen():
    found = []
    yield found
    assert set(found) == {"a run"}

@pytest.fixture
def batch():
    kept = types.SimpleNamespace(x=torch.zeros(2, 2), log=[])
    yield kept
    assert kept.x.sum() == 0 and kept.log == []

@pytest.fixture
def log(batch): return batch.log

@pytest.mark.deterministic(runs=3)
def test_uses(stable, seen, batch, log, monkeypatch, capsys, request):
    monkeypatch.setenv("LEAKS", "1")
    seen.append("a run")
    batch.x += 1
    log.append(1)
    assert (batch.x.sum(), batch.log) == (4, [1])
    assert request.getfixturevalue("seen") is seen
    print("printed")
    assert capsys.readouterr().out == "printed\\n"
    stable(x)

@pytest.mark.deterministic(runs=3)
def test_prints(stable):
    print("seen by pytest")
    os.system("echo by a process, too")
    stable(x)
    assert False

def test_nothing_leaked(): assert "LEAKS" not in os.environ
""",
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*Captured stdout call*", "seen by pytest", "by a process, too"])


@pytest.mark.usefixtures("racy")
def test_with_xdist(inner: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    result = run(
        inner,
        """
@pytest.mark.deterministic(runs=3)
@pytest.mark.parametrize("number", range(2))
def test_race(racing, number):
    racing(x)

@pytest.mark.deterministic(runs=3)
@pytest.mark.parametrize("number", range(2))
def test_stable(stable, number):
    stable(x)
""",
        "-p", "xdist", "-n", "2",
    )  # fmt: skip
    result.assert_outcomes(failed=2, passed=2)
    kept = [Path(text) for text in re.findall(r"trace: (\S+)", result.stdout.str())]
    assert len(set(kept)) == 2
    assert all(trace.is_file() for trace in kept)


def test_the_plugin_is_documented() -> None:
    page = (ROOT / "docs" / "pytest.md").read_text()
    for name in ("assert_deterministic", "@pytest.mark.deterministic", "tmp_path", "conditions"):
        assert name in page
    assert sys.version_info >= (3, 11)
