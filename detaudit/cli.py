"""The command line: commands are imported when they run, exit codes are decided here."""

from __future__ import annotations


def main() -> None:
    raise SystemExit("not built yet")
