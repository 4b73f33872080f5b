"""What a machine can audit, what changes its numerics, and combinations that are known to mislead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from detaudit.kernels import support
from detaudit.machine import Machine
from detaudit.numerics import FLAGS, VARIABLES, Level
from detaudit.scan.tools import EXTRA

FORMAT = "detaudit-doctor"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Check:
    """One line. ``topic`` groups lines; ``fix`` says what to do, where something should be done."""

    level: Level
    topic: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Whether a kernel of FlashInfer would run on GPUs of capability ``sm``, and what to know then."""

    kernel: str
    sm: int | None
    runs: bool
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    checks: tuple[Check, ...]
    kernels: tuple[KernelCheck, ...]
    machine: Machine

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible; of the environment only the variables that change numerics."""
        machine = asdict(self.machine)
        machine["variables"] = {name: machine["variables"][name] for name in _variables_set(self.machine)}
        checks, kernels = [*map(asdict, self.checks)], [*map(asdict, self.kernels)]
        return {
            "format": FORMAT,
            "version": VERSION,
            "checks": checks,
            "kernels": kernels,
            "machine": machine,
        }


def version_numbers(version: str | None) -> tuple[int, ...] | None:
    """``0.7.2.post1`` is (0, 7, 2): what follows the third number never mattered so far."""
    return None if version is None else tuple(map(int, re.findall(r"\d+", version)[:3]))


def diagnose(machine: Machine) -> Diagnosis:
    """Judge the facts; pure, but for a look whether an installed engine's source names its switch."""
    checks = (*_software(machine), *_gpus(machine), *_numerics(machine))
    if machine.torch_error is None:
        checks += (*_flashinfer(machine), *_engines(machine))
    return Diagnosis(checks, tuple(_kernels(machine)), machine)


def _software(machine: Machine) -> Iterator[Check]:
    yield Check("ok", "machine", f"Python {machine.python}, {machine.system}, {machine.cores} cores")
    if machine.torch_error:
        yield Check(
            "problem", "machine", f"torch cannot be imported: {machine.torch_error}", "reinstall torch"
        )
    else:
        built = f"built with CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
        yield Check("ok", "machine", f"torch {machine.versions.get('torch')}, {built}")
    if "triton" in machine.versions:
        yield Check("ok", "machine", f"Triton {machine.versions['triton']}")
    if machine.disassemblers:
        yield Check("ok", "machine", f"detaudit scan reads machine code with {machine.disassemblers[-1]}")
    else:
        text = "no disassembler: detaudit scan cannot read machine code"
        yield Check("note", "machine", text, EXTRA)


def _gpus(machine: Machine) -> Iterator[Check]:
    driver = f"driver {machine.driver or 'unknown'}"
    present = f"{machine.gpus_present} NVIDIA GPU(s), {driver}"
    for gpu in machine.gpus:
        yield Check("ok", "machine", f"{gpu.name}, SM{gpu.sm}, {gpu.memory_gib:.0f} GiB, {driver}")
    if machine.gpus or machine.torch_error:
        return
    if machine.gpus_present and machine.cuda is None:
        text = f"{present}, but torch is built without CUDA: everything runs on the CPU"
        yield Check("problem", "machine", text, "install a torch built with CUDA")
    elif machine.gpus_present:
        text = f"{present}, but torch cannot start CUDA {machine.cuda}: everything runs on the CPU"
        yield Check("problem", "machine", text, "look at nvidia-smi; the driver may be too old for this CUDA")
    else:
        text = "no GPU: models are audited on the CPU, and what needs a GPU is reported as unsupported"
        yield Check("note", "machine", text)


def _flashinfer(machine: Machine) -> Iterator[Check]:
    version = machine.versions.get("flashinfer-python")
    numbers = version_numbers(version)
    if version is None or numbers is None:
        text = "not installed: its kernels can be neither seen nor confirmed"
        yield Check("note", "flashinfer", text, "pip install flashinfer-python")
        return
    yield _supported_version(version, numbers)
    yield Check(
        "note",
        "flashinfer",
        "without autotuning, cutlass_fused_moe takes an unfused tactic even with use_fused_finalize=True: "
        "an untuned comparison shows nothing",
    )
    text = "with top_k of 1 or 2 the fused finalize cannot differ: such a comparison shows nothing"
    yield Check("note", "flashinfer", text)
    yield from _module(machine, version)
    yield from _known_bad(machine, version, numbers)


def _supported_version(version: str, numbers: tuple[int, ...]) -> Check:
    if numbers < support.OLDEST:
        text = f"{version}: cutlass_fused_moe has no use_fused_finalize before {_dotted(support.OLDEST)}"
        return Check("problem", "flashinfer", text, "upgrade FlashInfer")
    if numbers <= (0, 7, 2):
        default = "use_fused_finalize is True by default"
    else:
        default = (
            "by default the finalize is fused unless torch.use_deterministic_algorithms(True) was called"
        )
    if numbers > support.NEWEST:
        text = f"{version} is newer than what was read ({_dotted(support.NEWEST)}), where {default}"
        return Check("note", "flashinfer", text)
    return Check("ok", "flashinfer", f"{version}: {default}")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _module(machine: Machine, version: str) -> Iterator[Check]:
    """Whether the compiled module lies ready: building it takes longer than most people wait."""
    for sm in sorted({gpu.sm for gpu in machine.gpus}):
        if support.module_of(sm) in (None, *machine.prebuilt):
            continue
        fix = f"install flashinfer-jit-cache {version} (FlashInfer's installation page says how)"
        text = f"the CUTLASS MoE module for SM{sm} is not prebuilt"
        if machine.nvcc:
            yield Check(
                "note", "flashinfer", f"{text}; the first call compiles it, which can take an hour", fix
            )
        else:
            yield Check("problem", "flashinfer", f"{text}, and cannot be compiled without nvcc", fix)


def _known_bad(machine: Machine, version: str, numbers: tuple[int, ...]) -> Iterator[Check]:
    from detaudit.kernels.engines import autotune_cache_fault  # imports torch

    fault = autotune_cache_fault(version)
    caches = ", ".join(f"{folder} ({files} files)" for folder, files in machine.tuning_caches.items())
    if fault and caches:
        fix = "empty the folder, or upgrade FlashInfer to 0.6.18"
        yield Check("problem", "flashinfer", f"{fault}. Populated here: {caches}", fix)
    elif fault:
        yield Check("note", "flashinfer", fault)
    elif caches:
        text = f"tactics tuned earlier decide whether the fused kernel runs: {caches}"
        yield Check("note", "flashinfer", text)
    if machine.flags.get("deterministic_algorithms") and numbers > (0, 7, 2):
        text = (
            "torch.use_deterministic_algorithms is on, which turns the fused finalize off by default in this "
            "version: what runs here is not what runs without it"
        )
        yield Check("problem", "flashinfer", text, "pass use_fused_finalize explicitly")


def _variables_set(machine: Machine) -> list[str]:
    return [name for name in VARIABLES if machine.variables.get(name)]


def _numerics(machine: Machine) -> Iterator[Check]:
    variables = _variables_set(machine)
    for name in variables:
        known = VARIABLES[name]
        fix = f"unset {name}" if known.level == "problem" else ""
        yield Check(known.level, "numerics", f"{name}={machine.variables[name]}: {known.what}", fix)
    if not variables:
        yield Check("ok", "numerics", "no environment variable that changes numerics is set")
    changed = [name for name, (default, _) in FLAGS.items() if machine.flags.get(name, default) != default]
    for name in changed:
        yield Check("note", "numerics", f"torch {name} is {machine.flags[name]}: {FLAGS[name][1]}")
    if machine.flags and not changed:
        yield Check("ok", "numerics", "torch's own settings are the defaults")
    if "threads" in machine.flags:
        text = (
            f"{machine.flags['threads']} CPU threads: sums that are split over threads depend on this number"
        )
        yield Check("ok", "numerics", text)


def _engines(machine: Machine) -> Iterator[Check]:
    """Where each engine that is installed switches the fused finalize off."""
    from detaudit.kernels.engines import SWITCHES, finalize_guidance  # imports torch

    guidance = finalize_guidance(machine.versions.get).where
    for key, switch in SWITCHES.items():
        version = machine.versions.get(switch.distribution)
        if version is not None:
            yield Check("ok", "engines", f"{switch.distribution} {version}, fused finalize: {guidance[key]}")


def _kernels(machine: Machine) -> Iterator[KernelCheck]:
    numbers = version_numbers(machine.versions.get("flashinfer-python"))
    sms: list[int | None] = [*sorted({gpu.sm for gpu in machine.gpus})] or [None]
    for sm in sms:
        for kernel in support.KERNELS:
            reason = support.why_not(kernel, sm, numbers)
            known = "" if sm is None else support.finalize_on(kernel, sm)
            yield KernelCheck(kernel.name, sm, reason is None, reason or known)
