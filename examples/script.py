"""A plain script: no functions for detaudit, only a model that is called.

    detaudit run examples/script.py --runs 5 -- --steps 2

Every run is a fresh process that executes this file as ``__main__``. The outermost module called is the root,
and its outputs are the final output.
"""

from __future__ import annotations

import argparse

import racy_moe
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
steps = parser.parse_args().steps

model = racy_moe.build_model()
hidden = racy_moe.make_inputs()
with torch.no_grad():
    for _ in range(steps):
        logits = model(hidden)
print(f"{steps} step(s), mean logit {logits.mean():.3f}")
