"""Audits of targets written for one test."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

from detaudit.auditing import audit
from detaudit.core.options import Options
from detaudit.core.records import Report
from detaudit.target import resolve

_NUMBER = itertools.count()

PRELUDE = """
import os
import torch
from torch import nn
from tests.audit.situations import Combine, Embed, build, inputs
from tests.support import combine_racing

def make_inputs():
    return inputs()
"""


def write_target(folder: Path, source: str, prelude: str = PRELUDE) -> Path:
    """A target file with a module name that no other test has used."""
    path = folder / f"target_{next(_NUMBER)}.py"
    path.write_text(prelude + textwrap.dedent(source))
    return path


def run_audit(folder: Path, source: str, *, prelude: str = PRELUDE, **options: Any) -> Report:
    """Audit a target written for the occasion: 6 runs, without history control unless asked for."""
    path = write_target(folder, source, prelude)
    settings = {"runs": 6, "history": False, "confirm": False} | options
    return audit(resolve(str(path)), Options(**settings), folder / f"{path.stem}.detaudit")


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def modules(report: Report) -> list[str]:
    return [origin.module for origin in report.origins]
