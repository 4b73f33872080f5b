"""The report as JSON; ``detaudit.core.records`` describes every field."""

from __future__ import annotations

import json
from typing import IO

from detaudit.core.records import Report


class JsonReporter:
    """``Report.to_json``, indented."""

    def render(self, report: Report, stream: IO[str]) -> None:
        stream.write(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
