"""Facts about this machine, read without changing any. Imports torch only when asked to probe."""

from __future__ import annotations

import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from detaudit.core.errors import Unsupported
from detaudit.scan.tools import find_tools

PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "vllm",
    "sglang",
    "tensorrt-llm",
    "transformers",
    "numpy",
)
"""Distributions whose versions matter to an audit."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``sm``: compute capability as 10 * major + minor."""

    name: str
    sm: int
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What ``doctor`` judges.

    Args:
        gpus: those that torch can use.
        gpus_present: how many the driver knows, whether torch can use them or not.
        driver: of the NVIDIA kernel module.
        versions: of ``PACKAGES``; an absent one is left out.
        cuda: version torch was built with.
        nvcc: path of the compiler, if there is one.
        prebuilt: architectures whose CUTLASS MoE module lies there compiled (``90``).
        flags: torch's settings that change numerics, as they are in a fresh process.
        variables: environment variables that are set.
        tuning_caches: folders in which FlashInfer keeps what it tuned, and the number of files in each.
        torch_error: why torch could not be imported.
        disassemblers: NVIDIA's cuobjdump and nvdisasm, with version and path; none if one of them is missing.
    """

    python: str
    system: str
    cores: int
    gpus: tuple[Gpu, ...] = ()
    gpus_present: int = 0
    driver: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: str | None = None
    nvcc: str | None = None
    prebuilt: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    tuning_caches: Mapping[str, int] = field(default_factory=dict)
    torch_error: str | None = None
    disassemblers: tuple[str, ...] = ()


def probe() -> Machine:
    """This machine."""
    versions = {name: version for name in PACKAGES if (version := installed(name)) is not None}
    gpus: tuple[Gpu, ...] = ()
    flags: Mapping[str, Any] = {}
    cuda = error = None
    try:
        import torch

        versions["torch"] = torch.__version__
        cuda, gpus, flags = torch.version.cuda, _gpus(), torch_flags()
    except Exception as reason:  # a broken installation is a result here, not a crash
        error = f"{type(reason).__name__}: {reason}"
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        gpus=gpus,
        gpus_present=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        driver=_driver(),
        versions=versions,
        cuda=cuda,
        nvcc=_nvcc(os.environ),
        prebuilt=compiled_modules(
            metadata.distributions(), _module_folders(os.environ, versions.get("flashinfer-python"))
        ),
        flags=flags,
        variables=dict(os.environ),
        tuning_caches=tuning_caches(os.environ),
        torch_error=error,
        disassemblers=_disassemblers(),
    )


def _disassemblers() -> tuple[str, ...]:
    try:
        return find_tools().versions
    except Unsupported:
        return ()


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_flags() -> dict[str, Any]:
    """Torch's settings that change numerics, by name; one that this torch lacks is left out."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    readers: dict[str, Callable[[], Any]] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "threads": torch.get_num_threads,
        "interop_threads": torch.get_num_interop_threads,
    }
    flags = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some getters are deprecated in newer versions
        for name, read in readers.items():
            try:
                flags[name] = read()
            except (AttributeError, RuntimeError):
                continue
    return flags


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, 10 * p.major + p.minor, p.total_memory / 2**30) for p in properties)


def _driver() -> str | None:
    try:
        return driver_version(
            Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        )
    except OSError:
        return None


def driver_version(text: str) -> str | None:
    """From ``NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build ...``."""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _nvcc(variables: Mapping[str, str]) -> str | None:
    homes = [variables.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home, "bin", "nvcc") for home in [*homes, "/usr/local/cuda"] if home]
    return shutil.which("nvcc") or next((str(path) for path in candidates if path.is_file()), None)


def compiled_modules(
    distributions: Iterable[metadata.Distribution], folders: Iterable[Path]
) -> tuple[str, ...]:
    """Architectures of the CUTLASS MoE modules that lie in FlashInfer's packages or in ``folders``."""
    paths = [path for folder in folders for path in folder.glob("fused_moe_*/fused_moe_*.so")]
    names = {path.stem for path in paths}
    for distribution in distributions:
        if str(distribution.metadata["Name"]).lower().replace("_", "-").startswith("flashinfer"):
            names |= {
                file.stem for file in distribution.files or () if file.match("fused_moe_*/fused_moe_*.so")
            }
    return tuple(sorted(name.rpartition("_")[2] for name in names))


def _module_folders(variables: Mapping[str, str], version: str | None) -> list[Path]:
    """Where modules lie that no package lists: put into FlashInfer's own folder, or compiled earlier."""
    spec = util.find_spec("flashinfer")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    compiled = _flashinfer_cache(variables).glob(f"{version}/*/cached_ops")
    return [*(Path(root, "data", "aot") for root in roots), *compiled]


def _flashinfer_cache(variables: Mapping[str, str]) -> Path:
    return Path(variables.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")


def tuning_caches(variables: Mapping[str, str]) -> dict[str, int]:
    """Folders with tuned tactics (named by FlashInfer's variables, or its default) and the files in each."""
    named = [variables.get(name) for name in ("FLASHINFER_AUTOTUNE_CACHE_DIR", "FLASHINFER_AUTOTUNE_DIR")]
    folders = [*named, str(_flashinfer_cache(variables) / "autotune")]
    return {folder: files for folder in folders if folder and (files := _files(Path(folder)))}


def _files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*")) if folder.is_dir() else int(folder.is_file())
