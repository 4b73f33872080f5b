"""What is put back on a CUDA device, and the operator tap there."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import digest, make_digester
from detaudit.hooks import generators
from detaudit.hooks.inputs import InputCopies
from detaudit.hooks.operators import Operator, OperatorTap, first_differing
from detaudit.hooks.snapshot import Snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def draw(private: torch.Generator) -> list[float]:
    default = torch.rand((), device="cuda").item()
    return [default, torch.rand((), device="cuda", generator=private).item()]


def test_default_and_private_generators_are_put_back() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    private = torch.Generator("cuda").manual_seed(1)
    states = generators.capture({"g": private}, names=["model"])
    assert {"cuda:0", "model.g"} <= set(states.names)
    first, control = draw(private), draw(private)
    assert first != control
    assert set(states.consumed()) == {"cuda:0", "model.g"}
    assert generators.restore(states) == ()
    assert draw(private) == first


def test_reading_and_writing_states_does_not_synchronise() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.set_sync_debug_mode("error")
    try:
        states = generators.capture()
        assert generators.restore(states) == ()
    finally:
        torch.cuda.set_sync_debug_mode("default")


LATE = """
import torch
from detaudit.hooks import generators
before = generators.capture()
assert not torch.cuda.is_initialized() and "cuda:0" not in before.names
first = torch.rand(4, device="cuda")
assert "cuda:0" in dict(generators.restore(before))
states = generators.adopt(before)
again = torch.rand(4, device="cuda")
assert generators.restore(states) == ()
assert torch.equal(first, again) and torch.equal(first, torch.rand(4, device="cuda"))
"""


def test_cuda_brought_to_life_by_the_first_run_repeats_that_run() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device_bytes", [1 << 30, 0])
def test_buffers_are_put_back_from_device_and_from_host(device_bytes: int) -> None:
    model = nn.BatchNorm1d(4).cuda()
    snapshot = Snapshot.take(model, device_bytes=device_bytes)
    assert (snapshot.bytes_on_device > 0) == (device_bytes > 0)
    before = {name: digest(buffer) for name, buffer in model.named_buffers()}
    addresses = [buffer.data_ptr() for buffer in model.buffers()]
    model(torch.randn(8, 4, device="cuda"))
    assert {name: digest(buffer) for name, buffer in model.named_buffers()} != before
    assert snapshot.restore().failed == ()
    assert {name: digest(buffer) for name, buffer in model.named_buffers()} == before
    assert [buffer.data_ptr() for buffer in model.buffers()] == addresses


def test_inputs_are_copied_on_their_device_and_keep_pinning() -> None:
    x, pinned = torch.ones(4, 4, device="cuda"), torch.ones(4).pin_memory()
    copies = InputCopies((x[1:], x.t(), pinned))
    rows, transposed, host = copies.value
    assert rows.device == x.device
    assert rows.untyped_storage().data_ptr() == transposed.untyped_storage().data_ptr() != x.data_ptr()
    assert host.is_pinned()
    rows.zero_()
    assert copies.mutated() == ("inputs[0]", "inputs[1]")


def accumulate(rows: Tensor, tokens: Tensor) -> list[Operator]:
    digester = make_digester("cuda")
    with OperatorTap(digester, lambda: ("experts", 0)) as tap:
        out = torch.zeros(64, rows.shape[1], device="cuda")
        (out.index_add_(0, tokens, rows) * 2).relu()
    digester.finish()
    assert isinstance(tap, OperatorTap)
    return tap.operators()


def test_the_atomic_operator_is_named() -> None:
    rows = torch.randn(8192, 512, device="cuda")
    tokens = torch.arange(8192, device="cuda") % 64
    sums = {digest(torch.zeros(64, 512, device="cuda").index_add_(0, tokens, rows)).root for _ in range(20)}
    if len(sums) == 1:
        pytest.skip("void control: index_add_ in fp32 did not vary on this GPU")
    runs = [accumulate(rows, tokens) for _ in range(10)]
    found = {
        difference for a, b in combinations(runs, 2) if (difference := first_differing(a, b)) is not None
    }
    assert {(d.operator, d.kind) for d in found} == {("aten.index_add_.default", "outputs")}
