"""The tap on the real FlashInfer: importable without a GPU, where its kernels raise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from detaudit.hooks import flashinfer_state

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

SCRIPT = """
import json, sys
import torch
from detaudit.hooks.flashinfer_state import CUTLASS_MOE, contexts
from detaudit.hooks.functions import FunctionTap

seen = {}
with FunctionTap([CUTLASS_MOE], lambda: ("experts", 2), context=contexts()) as tap:
    seen["imported by the tap"] = "flashinfer" in sys.modules
    import flashinfer
    from flashinfer.fused_moe import cutlass_fused_moe
    ways = [cutlass_fused_moe, flashinfer.cutlass_fused_moe, flashinfer.fused_moe.core.cutlass_fused_moe]
    bf16 = {"dtype": torch.bfloat16}
    x, w1, w2 = torch.ones(4, 8, **bf16), torch.ones(2, 8, 8, **bf16), torch.ones(2, 8, 4, **bf16)
    chosen, scales = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    for function in ways:
        try:
            function(x, chosen, scales, w1, w2, torch.bfloat16, [], use_fused_finalize=True)
        except Exception as error:
            seen["error"] = f"{type(error).__name__}: {error}"
seen["problems"] = tap.problems
seen["tensors"] = [list(call.tensors) for call in tap.calls]
seen["parameters"] = [call.parameters for call in tap.calls]
seen["context"] = tap.calls[0].context
homes = (flashinfer, flashinfer.fused_moe, flashinfer.fused_moe.core)
after = [home.cutlass_fused_moe for home in homes]
seen["all alike"] = len(set(map(id, after + [cutlass_fused_moe]))) == 1
seen["ours"] = after[0].__code__.co_filename.endswith("functions.py")
try:
    after[0](x, chosen, scales, w1, w2, torch.bfloat16, [], use_fused_finalize=True)
except Exception as error:
    seen["error without"] = f"{type(error).__name__}: {error}"
print(json.dumps(seen, allow_nan=False))
"""


def test_cutlass_fused_moe_is_seen_by_every_name_and_its_error_passes() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    if "error" not in seen:
        pytest.skip("this machine runs the kernel; tests/gpu covers that")
    assert seen["imported by the tap"] is False
    assert seen["problems"] == {}
    tensors = [
        "input",
        "token_selected_experts",
        "token_final_scales",
        "fc1_expert_weights",
        "fc2_expert_weights",
    ]
    assert seen["tensors"] == [tensors] * 3
    assert (
        seen["parameters"]
        == [{"output_dtype": "bfloat16", "quant_scales": [], "use_fused_finalize": True}] * 3
    )
    assert seen["context"]["library"] == "flashinfer"
    assert seen["context"]["version"].count(".") >= 2
    assert seen["context"]["autotuner"] is None
    assert seen["context"]["defaults"]["activation_type"] == "Swiglu"
    assert seen["all alike"]
    assert not seen["ours"]
    assert seen["error"] == seen["error without"]


@dataclass(frozen=True)
class Key:
    custom_op: str
    nearest_profile: object


@pytest.mark.parametrize("with_runner", [True, False])
def test_tactics_are_read_from_either_layout_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, with_runner: bool
) -> None:
    profile = ((64, 2048), (64, 8))
    operator = "trtllm::fused_moe::gemm1"
    key: object = (operator, "MoERunner", 1234, profile) if with_runner else Key(operator, profile)
    value: tuple[object, ...] = (0, 7, None) if with_runner else (7, None)
    tuner = SimpleNamespace(is_tuning_mode=False, profiling_cache={key: value}, _file_configs={"a": 1})
    module = SimpleNamespace(AutoTuner=SimpleNamespace(_instance=tuner))
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", module)
    monkeypatch.setenv("FLASHINFER_CACHE_DIR", "/somewhere")
    assert flashinfer_state.autotuner_state() == {
        "autotuner": {
            "tuning": False,
            "tactics": {f"trtllm::fused_moe::gemm1 {profile}": 7},
            "from_file": 1,
        },
        "variables": {"FLASHINFER_CACHE_DIR": "/somewhere"},
    }


def test_nothing_loaded_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer.autotuner", raising=False)
    assert flashinfer_state.autotuner_state()["autotuner"] is None
    assert set(flashinfer_state.contexts()) == set(flashinfer_state.FUNCTIONS)
