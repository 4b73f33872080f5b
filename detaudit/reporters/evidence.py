"""How an audit made sure, in sentences: what it saw and put back, whether recording changed anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from detaudit.core.records import Report
from detaudit.reporters.wording import count, joined, module_name, plain


def unobserved(coverage: Mapping[str, Any]) -> list[str]:
    """What could not be seen, a line each: ``layers.0.attn out[1]: sparse layout``."""
    return [_unobserved_entry(entry) for entry in coverage.get("unobserved") or ()]


def _unobserved_entry(entry: Any) -> str:
    if isinstance(entry, Mapping):
        entry = [entry.get("module"), entry.get("site"), entry.get("reason")]
    if isinstance(entry, (list, tuple)) and len(entry) >= 3:
        module, site, reason = (str(part or "") for part in entry[:3])
        return f"{' '.join(filter(None, (module_name(module), site)))}: {reason}"
    return plain(entry)


def coverage_lines(report: Report) -> list[str]:
    """How much was seen, what was left out on request, and what the history control found."""
    coverage, lines = report.coverage, []
    counted = ((coverage.get("calls"), "call"), (coverage.get("modules_called"), "module"))
    seen = [count(number, noun) for number, noun in counted if number]
    if seen:
        lines.append(f"{' of '.join(seen)} in each run")
    elif coverage.get("excluded"):
        lines.append("no call was recorded: only final outputs were compared")
    if coverage.get("excluded"):
        lines.append(f"left out on request: {joined(map(module_name, coverage['excluded']))}")
    history = coverage.get("history")
    if isinstance(history, Mapping) and history.get("positions"):
        differing = history.get("differing") or 0
        what = (
            f"{differing:,} of {count(history['positions'], 'run')} differ from their counterpart, "
            "which does not point at memory of earlier runs"
            if differing
            else "every run equals its counterpart"
        )
        lines.append(f"history control, two fresh processes with the same sequence of runs: {what}")
    if coverage.get("unmatched"):
        number = count(len(coverage["unmatched"]), "call")
        lines.append(f"without a counterpart in other runs: {number}, listed by --format json")
    return lines


def observer_lines(observer: Mapping[str, Any]) -> list[str]:
    """What recording itself changed, as far as the runs without it tell."""
    if "agree" not in observer:
        return [f"{key.replace('_', ' ')}: {plain(value)}" for key, value in observer.items()]
    lines = [_observed("on", observer), _observed("off", observer)]
    agree, p_value = observer["agree"], observer.get("p_value")
    differs = bool(observer.get("differing_on") or observer.get("differing_off"))
    test = "" if p_value is None or not differs else f" (Fisher's exact test: p = {p_value:.2g})"
    verdicts = {True: "recording changed nothing that shows", False: "recording changes the outcome"}
    return [*lines, verdicts.get(agree, "nothing to compare") + test]


def _observed(side: str, observer: Mapping[str, Any]) -> str:
    runs, differing = observer.get(f"runs_{side}") or 0, observer.get(f"differing_{side}") or 0
    return f"hooks {side}: {count(runs, 'run')}, {differing:,} of {max(runs - 1, 0):,} comparisons differ"


_RESTORED = {
    "buffers": "{:,} of the model's",
    "bytes_on_device": "{:,} bytes of them kept on the device",
    "bytes_on_host": "{:,} bytes of them kept on the host",
}
"""How the counts in ``restored`` read."""
_LEFT = {
    "modules_training": ("module", "in train mode"),
    "modules_eval": ("module", "in eval mode"),
    "parameters_requiring_grad": ("parameter", "with requires_grad"),
}
"""Counts in ``restored`` of what is recorded and never touched."""


def restored(report: Report) -> tuple[list[str], list[str]]:
    """(what every run started with, what could not be put back and why)."""
    done: list[str] = []
    missing: list[str] = []
    for name, value in report.restored.items():
        label = name.replace("_", " ")
        values = value if isinstance(value, Mapping) else {label: value}
        left = [
            f"{count(values[key], noun)} {state}" for key, (noun, state) in _LEFT.items() if values.get(key)
        ]
        parts, lost = _restored_parts(label, {key: values[key] for key in values if key not in _LEFT})
        missing += lost
        if parts:
            done.append(label if parts == [label] else f"{label}: {joined(parts)}")
        if left:
            done.append(f"left as they are: {joined(left)}")
    return done, missing


def _restored_parts(label: str, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    parts: list[str] = []
    missing: list[str] = []
    for name, value in values.items():
        text = name.replace("_", " ") if name.isidentifier() else name
        if name == "not_put_back" and isinstance(value, Mapping):
            missing += [f"{path}: {why}" for path, why in value.items()]
        elif value is False or (isinstance(value, str) and value.startswith("not put back")):
            missing.append(f"{text}: {value.removeprefix('not put back: ')}" if value else text)
        elif value is True or value == "put back":
            parts.append(text)
        elif name in _RESTORED and isinstance(value, int):
            parts += [_RESTORED[name].format(value)] if value else []
        elif value not in (None, 0, "", [], (), {}):
            parts.append(plain(value) if text == label else f"{text} {plain(value)}")
    return parts, missing
