"""The gate: a policy, the evidence, and a decision that a CI job can end with. Never imports torch."""
