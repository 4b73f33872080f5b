"""pytest: the function and fixture ``assert_deterministic``, and the marker ``deterministic``.

pytest loads this with every run, so nothing heavy is imported before a test asks for it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from detaudit.core.records import Report

MARKER = "deterministic(runs=20, conditions=None): the test is run several times and must give the same bits"

NOT_AUDITED = (
    "not audited: the marker 'deterministic' works on plain test functions and methods; call "
    "assert_deterministic inside this test instead, or make it a plain function"
)
"""Of a TestCase's method, an async test, or one that another plugin calls in its own way."""

_AUDITED = pytest.StashKey[bool]()

_running: list[pytest.Item] = []
"""The test that is being called, if any."""


def assert_deterministic(
    fn: Callable[..., Any],
    /,
    *args: Any,
    runs: int = 20,
    conditions: Sequence[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Report:
    """Fail the test unless ``fn(*args, **kwargs)`` gives the same bits in every run, in all modules it calls.

    A failure names the origin and keeps the trace, with the captured call, under the test's ``tmp_path``. A
    comparison that shows nothing (one run, nothing returned and no module called) fails, too.

    Args:
        fn: an ``nn.Module`` or any other callable. Runs without gradients, on copies of its arguments.
        runs, conditions: as in ``detaudit.audit``.
        folder: where to keep the trace instead.

    Returns:
        The report.
    """
    from detaudit.api import arguments, as_path

    kept = _folder() if folder is None else as_path("folder", folder)
    return _check(fn, arguments(*args, **kwargs), runs, conditions, kept)


@pytest.fixture(name="assert_deterministic")
def assert_deterministic_fixture(tmp_path: Path) -> Callable[..., Report]:
    """``assert_deterministic``, with the trace under this test's ``tmp_path``."""

    def check(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Report:
        return assert_deterministic(fn, *args, **{"folder": tmp_path, **kwargs})

    return check


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _running.append(item)
    try:
        result = yield
    finally:
        _running.pop()
    marked = item.get_closest_marker("deterministic") is not None
    # A TestCase's failures and skips are not raised here, but kept for its report.
    if marked and _AUDITED not in item.stash and not getattr(item, "_excinfo", None):
        pytest.fail(NOT_AUDITED, pytrace=False)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A marked test is what is audited: its body, with the fixtures it was given."""
    marker, test = pyfuncitem.get_closest_marker("deterministic"), pyfuncitem.obj
    if marker is None or inspect.iscoroutinefunction(test) or inspect.isasyncgenfunction(test):
        return None
    from detaudit.api import arguments
    from detaudit.core.errors import UsageError

    options = _marker_options(marker)
    names = pyfuncitem._fixtureinfo.argnames
    copied, as_they_are = _split({name: pyfuncitem.funcargs[name] for name in names})

    @functools.wraps(test)
    def body(**copies: Any) -> Any:
        return test(**copies, **as_they_are)

    try:
        _check(body, arguments(**copied), folder=_folder(), **options)
    except UsageError as error:
        pytest.fail(f"@pytest.mark.deterministic: {error}", pytrace=False)
    return True


def _marker_options(marker: pytest.Mark) -> dict[str, Any]:
    def options(runs: int = 20, conditions: Sequence[str] | None = None) -> None: ...

    try:
        given = inspect.signature(options).bind(*marker.args, **marker.kwargs)
    except TypeError as error:
        pytest.fail(
            f"@pytest.mark.deterministic: {error}; its options are runs and conditions", pytrace=False
        )
    given.apply_defaults()
    return given.arguments


def _split(fixtures: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fixtures that a run could leave changed data in, and all that those hold; and the others."""
    from detaudit.hooks.inputs import holds_data
    from detaudit.hooks.reach import reachable

    own = {name: value for name, value in fixtures.items() if not _is_pytests(value)}
    data = {name: value for name, value in own.items() if holds_data(value)}
    inside = {id(value) for _, value in reachable("", data)}
    copied = {name: value for name, value in own.items() if name in data or id(value) in inside}
    return copied, {name: value for name, value in fixtures.items() if name not in copied}


def _is_pytests(fixture: object) -> bool:
    """Whether it is one of pytest's own: ``request`` and others lead to all there is in the session."""
    return type(fixture).__module__.partition(".")[0] == "_pytest"


def _check(
    fn: Callable[..., Any], inputs: Any, runs: int, conditions: Sequence[str] | None, folder: Path
) -> Report:
    from detaudit.api import audit
    from detaudit.core.errors import TargetRaised

    trace = _free_name(folder)
    try:
        report = audit(fn, inputs, runs=runs, conditions=conditions, trace=trace)
    except TargetRaised as error:
        _remove(trace)
        own = error.__cause__
        if own is None:
            raise
        raise own from own.__cause__  # the test's own failure, as if nothing had stood in between
    if _running:
        _running[-1].stash[_AUDITED] = True
    if report.verdict != "deterministic":
        pytest.fail(explanation(report, trace), pytrace=False)
    _remove(trace)
    return report


def explanation(report: Report, trace: Path) -> str:
    """Why a test fails: the verdict, the origins, the findings, and where to look."""
    from detaudit.reporters import wording
    from detaudit.trace import captures_dir

    lines = [f"{report.target}: {report.verdict}, {wording.rate_line(report)}"]
    for origin in report.origins:
        lines.append(f"origin: {wording.origin_line(origin, report)}")
        lines += [f"    {detail}" for detail in wording.origin_details(origin)]
    for finding in report.findings:
        place = f" in {wording.module_name(finding.module)}" if finding.module is not None else ""
        lines.append(f"finding {finding.kind}{place}: {finding.message}  [{finding.docs}]")
    for kernel in report.kernels:
        lines.append(f"kernel {kernel.case}: {kernel.outcome}, {kernel.outcome_reason}")
    lines.append(f"trace: {trace}")
    if any(captures_dir(trace).glob("*/case.json")):
        lines.append(f"a script without detaudit: detaudit repro {trace}")
    return "\n".join(lines)


def _folder() -> Path:
    """The running test's ``tmp_path``; outside of a test, a new temporary folder."""
    item = _running[-1] if _running else None
    if isinstance(item, pytest.Function):
        found: Path = item._request.getfixturevalue("tmp_path")
        return found
    import tempfile

    return Path(tempfile.mkdtemp(prefix="detaudit-"))


def _free_name(folder: Path) -> Path:
    number = 0
    while (path := folder / f"audit{f'-{number}' if number else ''}.detaudit").exists():
        number += 1
    return path


def _remove(trace: Path) -> None:
    import shutil

    from detaudit.trace import captures_dir

    trace.unlink(missing_ok=True)
    shutil.rmtree(captures_dir(trace), ignore_errors=True)
