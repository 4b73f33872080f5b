"""Modules that no attribute of the model leads to are looked at like others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.harness import run_audit

GLOBALS = """
RACING, TAIL = Combine(True), nn.Tanh()
def build_model(): return lambda x: TAIL(RACING(x))
"""
ALONE = """
RACING = Combine(True)
def build_model(): return lambda x: RACING(x)
"""
LISTED = """
class Hiding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tail, self.hidden = nn.Tanh(), [Combine(True)]
    def forward(self, x):
        return self.tail(self.hidden[0](x))
def build_model(): return Hiding()
"""


@pytest.mark.usefixtures("racy")
@pytest.mark.parametrize(("source", "module"), [(GLOBALS, "Combine#0"), (ALONE, ""), (LISTED, "Combine#0")])
def test_the_operator_is_named_and_the_module_rerun_alone(source: str, module: str, tmp_path: Path) -> None:
    report = run_audit(tmp_path, source)
    [origin] = report.origins
    assert (origin.module, origin.operator) == (module, "aten.index_put_.default")
    assert origin.isolated is True
    assert origin.healed is True
    assert list(tmp_path.glob("*.detaudit.d/operator-*"))
