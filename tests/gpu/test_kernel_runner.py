"""The runner on a GPU: nothing synchronises within a batch, and a real race is told from a fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from detaudit.kernels.backend import Poison
from detaudit.kernels.cases import Case
from detaudit.kernels.comparison import Comparison, Ring
from detaudit.kernels.confirm import confirm
from detaudit.kernels.reference_backend import ReferenceBackend
from detaudit.kernels.runner import FILLS, _Clock
from detaudit.kernels.shapes import Shape, Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def forbid_synchronisation() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    yield
    torch.cuda.set_sync_debug_mode(before)


def test_a_batch_enqueues_without_synchronising(forbid_synchronisation: None) -> None:
    output = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    workspace = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
    comparison = Comparison(output, "zeros", Ring(output))
    poison = Poison(workspace)
    clock = _Clock(output.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for fill in FILLS * 3:
        poison(fill)
        with clock:
            changed = output + (1 if fill == "ones" else 0)
        comparison.add(changed, fill)
    torch.cuda.set_sync_debug_mode("default")
    assert comparison.flush() == 9
    agreement = comparison.result()
    assert (agreement.runs_differing, agreement.distinct, agreement.rows_differing) == (3, 2, 64)
    assert len(clock.read()) == 9


def test_the_reference_races_on_a_gpu() -> None:
    shape = Shape("small", experts=16, top_k=8, hidden=1024, intermediate=64)
    case = ReferenceBackend().synthetic(Synthetic(shape, tokens=512, dtype="nvfp4"))
    assert isinstance(case, Case)
    assert case.device.type == "cuda"
    (report,) = confirm([case], runs=100)
    by_name = {variant.name: variant for variant in report.variants}
    if not by_name["atomic"].runs_differing:
        pytest.skip("void: the atomic finalize did not vary on this GPU, so nothing can be shown")
    assert report.outcome == "confirmed"
    assert by_name["ordered"].runs_differing == 0


def test_a_case_keeps_its_layout_on_a_gpu() -> None:
    base = torch.arange(512, dtype=torch.bfloat16, device="cuda")
    case = Case("case", "m:f", {"a": base[1:100], "b": base[50:60].view(2, 5).t()}, {})
    there = case.to(torch.device("cpu")).to(torch.device("cuda", torch.cuda.current_device()))
    for name, tensor in case.tensors.items():
        assert torch.equal(there.tensors[name], tensor)
        assert there.tensors[name].stride() == tensor.stride()
        assert there.tensors[name].data_ptr() % 256 == tensor.data_ptr() % 256
    there.tensors["a"].fill_(0)
    assert int(there.tensors["b"].count_nonzero()) == 0
