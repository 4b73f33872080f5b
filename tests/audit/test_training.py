"""Training whose backward pass races: nothing recorded at a call shows it before the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.harness import run_audit


@pytest.mark.usefixtures("racy")
def test_the_parameter_that_the_first_step_made_different_is_named(tmp_path: Path) -> None:
    report = run_audit(
        tmp_path,
        """
        enable_grad = True
        def build_model():
            torch.manual_seed(0)
            return nn.Sequential(Embed(), nn.Tanh(), nn.Linear(512, 4))
        def run_model(model, x):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
            return loss.detach()
        """,
    )
    assert (report.verdict, report.origins) == ("nondeterministic", ())
    [finding] = [f for f in report.findings if f.kind == "unobserved-producer"]
    assert "0 (call 1) is the first to give different outputs" in finding.message
    assert "(0.table, grad.0.table)" in finding.message
