"""``pytest tests/golden --regenerate`` rewrites the golden files instead of comparing with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from detaudit import __version__

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="rewrite tests/golden/*.txt")


def scrub(text: str, folder: Path) -> str:
    """Replace what differs from one machine or day to the next."""
    text = text.replace(str(folder), "<folder>").replace(__version__, "<version>")
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*", "<time>", text)


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/<name>.txt``."""
    # The option is unknown where a run starts above this folder.
    regenerate = request.config.getoption("--regenerate", default=False)

    def check(name: str, text: str) -> None:
        path = HERE / f"{name}.txt"
        text = scrub(text, tmp_path)
        if regenerate:
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; run: pytest tests/golden --regenerate"
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} changed; look, then pytest tests/golden --regenerate"
        )

    return check
