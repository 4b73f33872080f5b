"""One call of ``cutlass_fused_moe``, put together from a case for whichever release is installed.

Everything goes by keyword: the order of the parameters changed between releases.
"""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from detaudit.core.errors import Unsupported
from detaudit.kernels.cases import Case
from detaudit.kernels.layout import dtype_name, dtype_of

ENTRIES = ("flashinfer.fused_moe:cutlass_fused_moe", "flashinfer.fused_moe.core:cutlass_fused_moe")

_OURS = {"output", "workspace_buffer", "use_fused_finalize", "profile_ids"}
"""Given by the variant, never by the case."""

_PACKED = {torch.int64: 16, torch.uint8: 2}
"""4-bit values in one element of a weight."""


class Library:
    """The functions of the installed FlashInfer, imported when first asked for."""

    @cached_property
    def _module(self) -> Any:
        import flashinfer.fused_moe

        return flashinfer.fused_moe

    @cached_property
    def version(self) -> str:
        """Raises ImportError where there is no FlashInfer."""
        import flashinfer

        return str(flashinfer.__version__)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])

    @cached_property
    def function(self) -> Any:
        return self._module.cutlass_fused_moe

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @property
    def default_finalize(self) -> object:
        """What the release does where ``use_fused_finalize`` is not given: True, or None from 0.7.4 on."""
        return self.signature.parameters["use_fused_finalize"].default

    def workspace_bytes(self, **sizes: object) -> int | None:
        """Size of the buffer that a caller may hand in; ``None`` if the release takes none."""
        function = getattr(self._module, "cutlass_fused_moe_workspace_size", None)
        if function is None or "workspace_buffer" not in self.signature.parameters:
            return None
        known = inspect.signature(function).parameters
        return int(function(**{name: value for name, value in sizes.items() if name in known}))


class MoeCall:
    """The call that a case holds, with the finalize, the buffers and the launch mode of a variant.

    Args:
        case: with its tensors on the GPU.
        fused: ``use_fused_finalize``; always passed, since its default depends on the release and on
            ``torch.are_deterministic_algorithms_enabled()``.
        pdl: ``enable_pdl``; ``None`` leaves what the case has.

    Raises:
        Unsupported: an argument that this release does not have, or that cannot be rebuilt.
    """

    def __init__(
        self,
        library: Library,
        case: Case,
        *,
        fused: bool,
        pdl: bool | None = None,
        output: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        self._function = library.function
        self.arguments = arguments(case, library.signature)
        self.arguments["use_fused_finalize"] = fused
        extra = {"output": output, "workspace_buffer": workspace, "enable_pdl": pdl}
        self.arguments |= {name: value for name, value in extra.items() if value is not None}

    def __call__(self) -> Tensor:
        result = self._function(**self.arguments)
        output: Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return output


def arguments(case: Case, signature: inspect.Signature) -> dict[str, Any]:
    """What the case itself passes, by the names of this release."""
    given: dict[str, Any] = dict(case.parameters)
    lists: dict[str, dict[int, Any]] = {}
    for path, value in (*case.parameters.items(), *case.tensors.items()):
        if match := re.fullmatch(r"(\w+)\[(\d+)\]", path):
            lists.setdefault(match[1], {})[int(match[2])] = value
            given.pop(path, None)
        else:
            given[path] = value
    given |= {name: [items[i] for i in sorted(items)] for name, items in lists.items()}
    return {
        name: _rebuilt(name, value, signature.parameters[name])
        for name, value in given.items()
        if name not in _OURS and _is_known(case, name, value, signature)
    }


def _is_known(case: Case, name: str, value: object, signature: inspect.Signature) -> bool:
    if name in signature.parameters:
        return True
    if value is None or value is False:  # what a release without the parameter does
        return False
    raise Unsupported(f"case {case.name} passes {name}, which the FlashInfer installed here does not have")


def _rebuilt(name: str, value: object, parameter: inspect.Parameter) -> Any:
    """A value that JSON has no form for, from its name."""
    if isinstance(value, str) and isinstance(parameter.default, enum.Enum):
        try:
            return type(parameter.default)[value]
        except KeyError as error:
            raise Unsupported(f"{name} is {value}, which this FlashInfer does not have") from error
    if name == "output_dtype":
        return dtype_of(str(value))
    if isinstance(value, Mapping) and "object" in value:
        raise Unsupported(f"{name} is a {value['object']}, which cannot be rebuilt from a case")
    return value


def sizes(case: Case) -> dict[str, int]:
    """tokens, experts (of this rank), top_k, hidden and intermediate features, from the tensors' shapes."""
    experts, hidden, packed = case.tensors["fc2_expert_weights"].shape
    tokens, top_k = case.tensors["token_selected_experts"].shape
    per_element = _PACKED.get(case.tensors["fc2_expert_weights"].dtype, 1)
    return {
        "tokens": tokens,
        "experts": experts,
        "top_k": top_k,
        "hidden": hidden,
        "intermediate": packed * per_element,
    }


def new_output(case: Case) -> Tensor:
    size = sizes(case)
    return torch.empty(size["tokens"], size["hidden"], dtype=case.dtype("output_dtype"), device=case.device)


def workspace_bytes(library: Library, case: Case, fused: bool) -> int | None:
    """Of the workspace of this call; ``None`` if this release allocates it itself."""
    size = sizes(case)
    own = arguments(case, library.signature)
    parallel = {name: own[name] for name in ("tp_size", "tp_rank", "ep_size", "ep_rank") if name in own}
    modes = {name: value for name, value in own.items() if name.startswith(("use_", "activation_type"))}
    return library.workspace_bytes(
        max_num_tokens=size["tokens"],
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_experts_total=size["experts"] * int(parallel.get("ep_size") or 1),
        top_k=size["top_k"],
        x_dtype=case.tensors["input"].dtype,
        weight_dtype=case.tensors["fc1_expert_weights"].dtype,
        output_dtype=case.dtype("output_dtype"),
        device=case.device,
        **parallel,
        **{**modes, "use_fused_finalize": fused},
    )


def weights_of(case: Case) -> str:
    """The weight format, by its name in ``kernels.support``.

    Raises:
        Unsupported: a combination of input and weights that is none of those.
    """
    try:
        x, weight = case.tensors["input"].dtype, case.tensors["fc1_expert_weights"].dtype
    except KeyError as error:
        raise Unsupported(f"case {case.name} has no tensor {error}; capture it again") from error

    def on(flag: str) -> bool:
        return bool(case.parameters.get(flag, False))

    if on("use_deepseek_fp8_block_scale"):
        return "fp8 block scale"
    if weight == torch.int64 and x != torch.float8_e4m3fn:
        return "NVFP4"
    if x == weight and weight in (torch.bfloat16, torch.float16):
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}[weight]
    if x == weight == torch.float8_e4m3fn and not on("use_mxfp8_act_scaling"):
        return "fp8 per tensor"
    if weight == torch.uint8 and on("use_w4_group_scaling") and not on("use_wfp4afp8_humming"):
        return "W4A8 int4" if on("use_packed_weights") else "W4A16 MXFP4"
    raise Unsupported(
        f"{case.name} multiplies {dtype_name(x)} by weights stored as {dtype_name(weight)}, a combination "
        "that this backend does not know"
    )
