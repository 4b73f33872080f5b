"""Fixtures for every test: nothing may be left on torch, and a race must have been seen to race."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.leaks import GlobalState

# A suite that was started in the background ignores Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run of the suite; HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile("suite", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))

VOID_CONTROLS = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a hook, a mode, a wrapped method or a changed global setting."""
    before = GlobalState()
    yield
    leftovers = before.leftovers()
    before.put_back()
    if leftovers:
        pytest.fail("left behind: " + "; ".join(leftovers), pytrace=False)


@pytest.fixture
def racy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Four threads, on a machine where unordered accumulation has just been seen to vary; else a skip."""
    from tests.support import race_varies, threads

    with threads(4):
        if not race_varies():
            request.config.stash.setdefault(VOID_CONTROLS, []).append(request.node.nodeid)
            pytest.skip("void control: index_put_(accumulate=True) in fp32 did not vary on this machine")
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    void = terminalreporter.config.stash.get(VOID_CONTROLS, [])
    if void:
        terminalreporter.write_line(f"{len(void)} tests skipped, because their control did not vary")
