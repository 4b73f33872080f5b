"""The report as JSON; ``detaudit.core.records`` describes every field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

from detaudit.core.records import Report


def write_json(body: Mapping[str, object], stream: IO[str]) -> None:
    """As every command writes JSON: indented, and with letters of all languages as they are."""
    stream.write(json.dumps(body, indent=2, ensure_ascii=False) + "\n")


class JsonReporter:
    """``Report.to_json``, indented."""

    def render(self, report: Report, stream: IO[str]) -> None:
        write_json(report.to_json(), stream)
