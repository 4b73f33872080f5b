"""Backend ``flashinfer-cutlass``: FlashInfer's CUTLASS mixture of experts under its finalize variants.

``use_fused_finalize`` only decides which GEMM2 tactics exist; which one runs is the autotuner's choice, and
untuned that is an unfused one. So nothing here is concluded from the argument: the runner is asked how many
tactics it has with and without, and the kernels a tactic launches show whether it finalizes in its epilogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from detaudit.core.errors import Unsupported
from detaudit.kernels import flashinfer_call as call
from detaudit.kernels import flashinfer_graph as graph
from detaudit.kernels import flashinfer_tactics as tactics
from detaudit.kernels.backend import (
    Available,
    Fill,
    Guidance,
    Options,
    Poison,
    Prepared,
    Unavailable,
    Variant,
    commutes,
)
from detaudit.kernels.cases import Case
from detaudit.kernels.engines import finalize_guidance
from detaudit.kernels.flashinfer_fp64 import reference_fp64
from detaudit.kernels.flashinfer_synthetic import synthetic_case, weights_asked
from detaudit.kernels.flashinfer_tactics import Tactics
from detaudit.kernels.flashinfer_variants import AUTOTUNED, UNTUNED, Plan, variants_of
from detaudit.kernels.shapes import Synthetic
from detaudit.kernels.support import KERNELS, OLDEST, MoeKernel, sm_list

PROBES = 8
"""Runs that do not all agree with one before, for a tactic to count as fused where kernels have no names."""


class FlashInferCutlass:
    """``kernels.backend.Backend`` over ``flashinfer.fused_moe.cutlass_fused_moe``."""

    name = "flashinfer-cutlass"
    sweeps: tuple[str, ...] = ("tactics",)

    def __init__(self) -> None:
        self.library = call.Library()
        self._plans: list[tuple[Case, Plan]] = []
        self._workspace: Tensor | None = None

    def accepts(self, case: Case) -> bool:
        return case.entry in call.ENTRIES

    def availability(self, case: Case) -> Available | Unavailable:
        try:
            weights = call.weights_of(case)
        except Unsupported as error:
            return Unavailable(str(error), "nothing that this backend knows")
        found = self._here(weights)
        if isinstance(found, Unavailable):
            return found
        try:
            call.arguments(case, self.library.signature)
        except Unsupported as error:
            return Unavailable(str(error), f"FlashInfer {case.context.get('version', 'of another version')}")
        return found

    def cannot_differ(self, case: Case) -> str | None:
        if (reason := commutes(call.sizes(case)["top_k"])) is not None:
            return reason
        plan, weights, sm = self._plan(case), call.weights_of(case), _sm(case.device)
        if plan.can_fuse:
            return None
        return (
            f"with {weights} weights on SM{sm} no tactic fuses the finalize (GEMM2 has {len(plan.unfused)} "
            "tactics with use_fused_finalize and as many without)"
        )

    def variants(self, case: Case, options: Options) -> Sequence[Variant]:
        plan = self._plan(case)
        return variants_of(plan, self._own_settings(case, plan), sweep="tactics" in options.sweeps)

    def prepare(self, case: Case, variant: Variant) -> Prepared:
        settings = variant.settings
        fused: bool = settings["use_fused_finalize"]
        prepared = self._prepared(case, fused=fused, pdl=settings.get("enable_pdl"))
        if settings["tactics"] == AUTOTUNED:
            prepared.tactics = tactics.tune(prepared.launch, call.sizes(case)["tokens"])
        elif settings["tactics"] != UNTUNED:
            prepared.tactics = Tactics(*settings["tactics"])
        if settings.get("cuda_graph"):
            prepared.record()
        return prepared

    def reference_fp64(self, case: Case) -> Tensor | None:
        return reference_fp64(case)

    def guidance(self, case: Case, variant: Variant) -> Guidance:
        return finalize_guidance()

    def synthetic(self, wanted: Synthetic) -> Case | Unavailable:
        found = self._here(weights_asked(wanted))
        return found if isinstance(found, Unavailable) else synthetic_case(wanted, found.device)

    def noted(self, case: Case) -> Case:
        """A case captured in this process just now, with what decides which tactics its call takes.

        ``context`` gets ``tactics`` (those its call would take; nothing is launched), ``sm`` and
        ``deterministic_algorithms``.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        context = {**case.context, "deterministic_algorithms": deterministic, "sm": _sm(case.device)}
        noted = replace(case, context=context)
        chosen = self.tactics_in_use(noted)
        return replace(noted, context={**context, "tactics": [chosen.gemm1, chosen.gemm2]})

    def tactics_in_use(self, case: Case) -> Tactics:
        """The tactics the case's own call would take as this process is tuned now."""
        launch = call.MoeCall(self.library, case, fused=self._own_finalize(case))
        return tactics.in_use(launch)

    def _here(self, weights: str) -> Available | Unavailable:
        """Whether weights of this format run on this machine."""
        kernel = next(k for k in KERNELS if (k.entry, k.weights) == ("cutlass_fused_moe", weights))
        if not torch.cuda.is_available():
            return Unavailable("there is no CUDA GPU here", _needs(kernel))
        device = torch.device("cuda", torch.cuda.current_device())
        if _sm(device) not in kernel.sms:
            name = torch.cuda.get_device_name(device)
            return Unavailable(f"{weights} weights cannot run on SM{_sm(device)} ({name})", _needs(kernel))
        try:
            version, numbers = self.library.version, self.library.numbers
        except ImportError as error:
            return Unavailable(f"FlashInfer cannot be imported here ({error})", _needs(kernel))
        if numbers < kernel.since or "use_fused_finalize" not in self.library.signature.parameters:
            reason = f"cutlass_fused_moe of FlashInfer {version} has no use_fused_finalize"
            return Unavailable(reason, _needs(kernel))
        return Available(device)

    def _own_finalize(self, case: Case) -> bool:
        """``use_fused_finalize`` as the case's call resolves it."""
        defaults = case.context.get("defaults", {})
        given = case.parameters.get("use_fused_finalize", defaults.get("use_fused_finalize"))
        if given is None:
            given = self.library.default_finalize
        # None, from 0.7.4 on: fused unless deterministic algorithms are asked for.
        return not case.context.get("deterministic_algorithms", False) if given is None else bool(given)

    def _own_settings(self, case: Case, plan: Plan) -> dict[str, Any]:
        """The settings that repeat the captured call; its tactics may mean nothing here, then it is tuned."""
        fused = self._own_finalize(case)
        settings: dict[str, Any] = {"use_fused_finalize": fused, "tactics": UNTUNED}
        chosen = case.parameters.get("profile_ids") or case.context.get("tactics")
        if chosen is None:
            tuned = (case.context.get("autotuner") or {}).get("tactics") or {}
            if any(name.startswith(tactics.GEMM2) for name in tuned):
                settings |= {"tactics": AUTOTUNED, "captured": "tuned; its tactic is not on record"}
            return settings
        if list(chosen) == [tactics.UNTUNED, tactics.UNTUNED]:
            return settings
        captured = (case.context.get("version"), case.context.get("sm"))
        here = (self.library.version, _sm(case.device))
        known = plan.fused if fused else plan.unfused
        if captured != here or chosen[1] not in (tactics.UNTUNED, *known):
            was = f"FlashInfer {captured[0]} on SM{captured[1]} with tactics {list(chosen)}"
            return settings | {"tactics": AUTOTUNED, "captured": f"{was}, which mean nothing here"}
        return settings | {"tactics": list(chosen)}

    def _plan(self, case: Case) -> Plan:
        for known, plan in self._plans:
            if known is case:
                return plan
        gemm1, fused = self._tactics(case, True)
        _, unfused = self._tactics(case, False)
        plan = Plan(gemm1, fused, unfused, None)
        if plan.can_fuse:
            plan = replace(plan, finalize=self._find_finalize(case, plan))
        self._plans = [(case, plan)]
        return plan

    def _tactics(self, case: Case, fused: bool) -> tuple[int, tuple[int, ...]]:
        """How many GEMM1 tactics the runner has, and the positions of its GEMM2 tactics."""
        runner = tactics.runner_of(call.MoeCall(self.library, case, fused=fused))
        gemm1 = int(runner.get_gemm1_tactic_count())
        return gemm1, tuple(range(gemm1, gemm1 + int(runner.get_gemm2_tactic_count())))

    def _find_finalize(self, case: Case, plan: Plan) -> int | None:
        """The first GEMM2 tactic that is proven to take the fused finalize."""
        prepared = self._prepared(case, fused=True)
        for gemm2 in plan.fused:
            prepared.tactics = Tactics(gemm2=gemm2)
            try:
                if prepared.fused():
                    return gemm2
            except RuntimeError:  # this tactic does not run on this GPU; the next one may
                continue
        return None

    def _prepared(self, case: Case, *, fused: bool, pdl: bool | None = None) -> PreparedCall:
        output = call.new_output(case)
        workspace = self._workspace_for(case)
        launch = call.MoeCall(self.library, case, fused=fused, pdl=pdl, output=output, workspace=workspace)
        return PreparedCall(launch, [output] if workspace is None else [output, workspace])

    def _workspace_for(self, case: Case) -> Tensor | None:
        """One buffer for all variants of a case, which run one after the other on one stream."""
        needed = [call.workspace_bytes(self.library, case, fused) for fused in (True, False)]
        size = max(n or 0 for n in needed)
        if not size:
            return None
        held = self._workspace
        if held is None or held.numel() < size or held.device != case.device:
            held = self._workspace = torch.empty(size, dtype=torch.uint8, device=case.device)
        return held[:size]


class PreparedCall:
    """``kernels.backend.Prepared``: launches with given tactics, or replays one such launch from a graph."""

    def __init__(self, launch: call.MoeCall, buffers: Sequence[Tensor]) -> None:
        self.launch = launch
        self._run: graph.Work = launch
        self._poison = Poison(*buffers)
        self._tactics = Tactics()
        self._proof: bool | None = None

    @property
    def tactics(self) -> Tactics:
        return self._tactics

    @tactics.setter
    def tactics(self, chosen: Tactics) -> None:
        self._tactics, self._proof = chosen, None

    def active(self) -> AbstractContextManager[object]:
        return tactics.answering(self._tactics)

    def record(self) -> None:
        with self.active():
            self._run = graph.Replay(self.launch)

    def poison(self, fill: Fill) -> None:
        self._poison(fill)

    def run(self) -> Tensor:
        return self._run()

    def tactic(self) -> str | None:
        return str(self._tactics)

    def fused(self) -> bool | None:
        """By the kernels it launches; where these cannot be named, by whether a few runs in a row differ."""
        if self._proof is None:
            with self.active():
                self.launch()
                proof = graph.takes_fused(self.launch)
            self._proof = self._varies() if proof is None else proof
        return self._proof

    def _varies(self) -> bool:
        with self.active():
            first = self.launch().clone()
            return any(not torch.equal(self.launch(), first) for _ in range(PROBES))


def _needs(kernel: MoeKernel) -> str:
    release = ".".join(map(str, max(kernel.since, OLDEST)))
    return f"{sm_list(kernel.sms)} with FlashInfer {release} or newer"


def _sm(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
