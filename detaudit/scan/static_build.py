"""Build GEMM2 kernels of the installed FlashInfer for a GPU that is not here, so that they can be scanned.

FlashInfer generates its CUTLASS MoE kernels as one macro per kernel; a few of those are compiled to cubins
with nvcc alone: no GPU, no host code, no import of FlashInfer or torch. Kernels come in pairs, FINALIZE and
NONE, equal in all else. Flags are those of ``flashinfer/jit/fused_moe.py`` (0.6.16 to 0.7.4).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from detaudit.core.errors import Unsupported
from detaudit.core.scans import ScanReport
from detaudit.scan.cache import cache_folder
from detaudit.scan.scanner import Settings, plan, scan
from detaudit.scan.tools import find_tools, package_path, version

_COMMON: Final = ("ENABLE_BF16", "ENABLE_FP8", "ENABLE_FP4", "USING_OSS_CUTLASS_MOE_GEMM")
_BLACKWELL: Final = ("COMPILE_BLACKWELL_TMA_GEMMS", "CUTLASS_ENABLE_GDC_FOR_SM100=1")
_HOPPER: Final = (
    "COMPILE_HOPPER_TMA_GEMMS",
    "COMPILE_HOPPER_TMA_GROUPED_GEMMS",
    "CUTLASS_ENABLE_GDC_FOR_SM90=1",
    "CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
)
_MACROS: Final[Mapping[str, tuple[str, ...]]] = {
    "90": _HOPPER,
    "100": (*_BLACKWELL, "COMPILE_BLACKWELL_TMA_GROUPED_GEMMS"),
    "103": (
        *_BLACKWELL,
        "COMPILE_BLACKWELL_TMA_GROUPED_GEMMS",
        "COMPILE_BLACKWELL_SM103_TMA_GROUPED_GEMMS",
    ),
    "120": (*_BLACKWELL, "COMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS"),
    "121": (*_BLACKWELL, "COMPILE_BLACKWELL_SM120_TMA_GROUPED_GEMMS"),
}
ARCHITECTURES: Final = tuple(_MACROS)
_FLASHINFER: Final = (
    *(f"FLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")),
    *(f"FLASHINFER_ENABLE_{name}" for name in ("FP8_E8M0", "FP4_E2M1")),
)
_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "nvfp4": frozenset({"SafeFP4", "__nv_fp4_e2m1"}),
    "fp8": frozenset({"__nv_fp8_e4m3"}),
    "bf16": frozenset({"__nv_bfloat16"}),
    "fp16": frozenset({"half"}),
}
"""C++ names of the types of activations and weights; FlashInfer 0.7 renamed its 4-bit float."""
_HEADERS: Final[Mapping[str, str]] = {
    "cuda_runtime.h": "nvidia-cuda-runtime",
    "cuda_fp8.h": "nvidia-cuda-runtime",
    "crt/host_config.h": "nvidia-cuda-crt",
    "cublasLt.h": "nvidia-cublas",
}
"""A header of CUDA's that the kernels include, and the package on PyPI that has it."""
_LAUNCHER: Final = "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"
_MACRO: Final = re.compile(r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(([^()]*)\);")
_BYTES_PER_JOB: Final = 4 << 30
"""Memory of one compilation, at most, as seen with nvcc 13.0."""

_GENERATE: Final = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from cutlass.generate_kernels import generate_gemm_operations
generate_gemm_operations(pathlib.Path(sys.argv[2]), sys.argv[3])
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel to build: the arguments of FlashInfer's macro, as text."""

    arguments: tuple[str, ...]

    @property
    def fusion(self) -> str:
        return self.arguments[6]

    @property
    def tile(self) -> tuple[int, ...]:
        """M, N, K of the block's tile."""
        return tuple(int(number) for number in self.arguments[7:10])

    @property
    def label(self) -> str:
        swapped = ", A and B swapped" if self.arguments[-1] == "true" else ""
        return f"{self.fusion} {'x'.join(map(str, self.tile))}{swapped}"

    @property
    def source(self) -> str:
        return (
            f'#include "{_LAUNCHER}"\n'
            "namespace tensorrt_llm { namespace kernels { namespace cutlass_kernels_oss {\n"
            f"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM({', '.join(self.arguments)});\n"
            "} } }\n"
        )


@dataclass(frozen=True, slots=True)
class Toolchain:
    """nvcc, include folders and FlashInfer's own files; made by ``find_toolchain``."""

    nvcc: Path
    includes: tuple[Path, ...]
    flashinfer: Path

    def command(self, sm: str, source: Path, cubin: Path) -> list[str]:
        macros = (*_COMMON, *_FLASHINFER, *_MACROS[sm])
        flags = ["-std=c++17", "-O3", "-DNDEBUG", "-use_fast_math", "--expt-relaxed-constexpr", "-w"]
        return [
            str(self.nvcc), "-cubin", *flags, *(f"-D{macro}" for macro in macros),
            *(f"-I{folder}" for folder in self.includes),
            f"-gencode=arch=compute_{sm}a,code=sm_{sm}a", str(source), "-o", str(cubin),
        ]  # fmt: skip


def static_scan(sm: str, dtype: str, limit: int, advance: Callable[[], None] = lambda: None) -> ScanReport:
    """Build ``limit`` pairs of kernels, FINALIZE and NONE, and scan them.

    Args:
        sm: ``120`` and the like; see ``ARCHITECTURES``.
        dtype: ``nvfp4``, ``fp8``, ``bf16`` or ``fp16``, of activations and weights.
        advance: called whenever a kernel is built.

    Raises:
        Unsupported: a tool or a header is missing, or FlashInfer has no such kernel; says what to do.
    """
    tools, toolchain = find_tools(), find_toolchain()
    kernels = choose(toolchain, sm, dtype, limit)
    cubins = build(toolchain, sm, kernels, cache_folder().parent / "static", advance)
    report = scan(plan(cubins), tools, Settings(cache=cache_folder()))
    broken = next((file.problem for file in report.files if file.problem), None)
    if broken:
        raise Unsupported(f"the kernels were built but cannot be read: {broken}")
    return report


def find_toolchain() -> Toolchain:
    """Everything that is needed, or an error that says what to install.

    Raises:
        Unsupported: FlashInfer, nvcc or a header is missing.
    """
    flashinfer = package_path("flashinfer")
    if flashinfer is None:
        raise Unsupported("FlashInfer is not installed; pip install flashinfer-python")
    if not (flashinfer / "data" / "csrc").is_dir():
        raise Unsupported(
            f"{flashinfer} holds no sources to build; pip install flashinfer-python 0.6.16 or newer"
        )
    nvcc = next((folder / "nvcc" for folder in _cuda_folders("bin") if (folder / "nvcc").is_file()), None)
    if nvcc is None:
        raise Unsupported(
            "nvcc not found: building kernels for another GPU needs CUDA's compiler, 12.8 or newer; "
            "install the CUDA toolkit and put its bin folder on PATH, or pip install nvidia-cuda-nvcc"
        )
    includes = (*_flashinfer_includes(flashinfer), *_named_includes(), *_cuda_folders("include"))
    for header, package in _HEADERS.items():
        own = nvcc.parent / header  # nvcc finds those beside it by itself
        if not own.is_file() and not any((folder / header).is_file() for folder in includes):
            raise Unsupported(f"CUDA's header {header} not found; pip install {package}, or set CUDA_HOME")
    return Toolchain(nvcc, includes, flashinfer)


def _cuda_folders(name: str) -> list[Path]:
    """Existing folders ``name`` of CUDA installations and of NVIDIA's packages, in order of preference."""
    homes = [Path(home) for variable in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(variable))]
    if there := shutil.which("nvcc"):
        homes.append(Path(there).resolve().parent.parent)
    homes.append(Path("/usr/local/cuda"))
    nvidia = package_path("nvidia")
    homes += sorted(nvidia.glob("*"), reverse=True) if nvidia else []
    return [folder for folder in dict.fromkeys(home / name for home in homes) if folder.is_dir()]


def _named_includes() -> Iterator[Path]:
    """Folders that compilers take from the environment; nvcc's own front end does not read them all."""
    for variable in ("CPATH", "CPLUS_INCLUDE_PATH"):
        for folder in filter(None, os.environ.get(variable, "").split(os.pathsep)):
            yield Path(folder)


def _flashinfer_includes(flashinfer: Path) -> Iterator[Path]:
    data = flashinfer / "data"
    internal = data / "csrc" / "nv_internal"
    cutlass_kernels = internal / "tensorrt_llm" / "kernels" / "cutlass_kernels"
    folders = [
        internal, internal / "include", internal / "tensorrt_llm" / "cutlass_extensions" / "include",
        cutlass_kernels / "include", cutlass_kernels,
        data / "cccl" / "cub", data / "cccl" / "libcudacxx" / "include", data / "cccl" / "thrust",
        data / "cutlass" / "include", data / "cutlass" / "tools" / "util" / "include",
        data / "csrc", data / "include", data / "spdlog" / "include",
    ]  # fmt: skip
    ffi = package_path("tvm_ffi")
    folders += [ffi / "include"] if ffi else []
    return (folder for folder in folders if folder.is_dir())


def choose(toolchain: Toolchain, sm: str, dtype: str, limit: int) -> list[Kernel]:
    """At most ``limit`` pairs of kernels FlashInfer builds for ``sm`` and ``dtype``, smallest tiles first.

    Raises:
        Unsupported: FlashInfer has none, or its generator does not run.
    """
    if sm not in _MACROS:
        raise Unsupported(f"--sm {sm} is not known here; it can be {', '.join(ARCHITECTURES)}")
    with tempfile.TemporaryDirectory(prefix="detaudit-generate-") as folder:
        found = kernels_in(_generated(toolchain, sm, Path(folder)))
    matching = [kernel for kernel in found if kernel.arguments[1] in _TYPES[dtype] and _plain(kernel)]
    pairs = _pairs(matching)
    if not pairs:
        raise Unsupported(
            f"FlashInfer {_flashinfer_version()} builds no {dtype} GEMM with a fused finalize for SM{sm}"
        )
    return [kernel for pair in pairs[:limit] for kernel in pair]


def _plain(kernel: Kernel) -> bool:
    """Equal types of activations and weights, output in bf16 (fp16 for fp16), no MX scales."""
    act, weight, out = kernel.arguments[1:4]
    return (
        act == weight
        and out == ("half" if act == "half" else "__nv_bfloat16")
        and kernel.arguments[-4] == "false"
    )


def _generated(toolchain: Toolchain, sm: str, folder: Path) -> Iterator[str]:
    generator = toolchain.flashinfer / "jit" / "gemm"
    target = "120" if sm == "121" else sm
    command = [sys.executable, "-c", _GENERATE, str(generator), str(folder), f"{target};{target}-real"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unsupported(
            f"this FlashInfer's kernel generator does not run here ({said}); try 0.6.16 to 0.7.4"
        )
    for path in sorted((folder / "gemm_grouped" / target).glob("*.cu")):
        yield path.read_text(encoding="utf-8")


def kernels_in(sources: Iterable[str]) -> list[Kernel]:
    """The kernels that generated sources instantiate."""
    found = []
    for source in sources:
        for arguments in _MACRO.findall(source):
            parts = tuple(part.strip() for part in arguments.split(","))
            if len(parts) >= 14:
                found.append(Kernel(parts))
    return list(dict.fromkeys(found))


def _pairs(kernels: Sequence[Kernel]) -> list[tuple[Kernel, Kernel]]:
    """(FINALIZE, NONE) of kernels that are equal in all else, smallest tiles first."""
    by_rest: dict[tuple[str, ...], dict[str, Kernel]] = {}
    for kernel in kernels:
        rest = (*kernel.arguments[:6], *kernel.arguments[7:])
        by_rest.setdefault(rest, {})[kernel.fusion] = kernel
    pairs = [
        (found["FINALIZE"], found["NONE"]) for found in by_rest.values() if {"FINALIZE", "NONE"} <= set(found)
    ]
    return sorted(
        pairs, key=lambda pair: (pair[0].tile[0] * pair[0].tile[1] * pair[0].tile[2], pair[0].arguments)
    )


def build(
    toolchain: Toolchain,
    sm: str,
    kernels: Sequence[Kernel],
    folder: Path,
    advance: Callable[[], None] = lambda: None,
    jobs: int = 0,
) -> list[Path]:
    """Compile each kernel to a cubin in ``folder``; one that is there already, from the same source, is kept.

    Args:
        advance: called in this thread whenever a kernel is done.
        jobs: compilations at a time; 0 takes as many as CPUs and memory allow (4 GiB each).

    Raises:
        Unsupported: nvcc failed; says how.
    """
    folder.mkdir(parents=True, exist_ok=True)
    version(toolchain.nvcc)  # asked once, not by every thread
    with ThreadPoolExecutor(jobs or _jobs(), "nvcc") as pool:
        futures = {pool.submit(_compile, toolchain, sm, kernel, folder): kernel for kernel in kernels}
        built: dict[Kernel, Path] = {}
        try:
            for future in as_completed(futures):
                built[futures[future]] = future.result()
                advance()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    return [built[kernel] for kernel in kernels]


def _jobs() -> int:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)), memory // _BYTES_PER_JOB))


def _compile(toolchain: Toolchain, sm: str, kernel: Kernel, folder: Path) -> Path:
    what = "|".join((kernel.source, sm, version(toolchain.nvcc), _flashinfer_version()))
    name = hashlib.sha256(what.encode()).hexdigest()[:20]
    cubin = folder / f"{kernel.fusion.lower()}-{'x'.join(map(str, kernel.tile))}-{name}.sm_{sm}a.cubin"
    if cubin.is_file():
        return cubin
    with tempfile.TemporaryDirectory(prefix="detaudit-nvcc-", dir=folder) as temporary:
        source, built = Path(temporary) / "kernel.cu", Path(temporary) / "kernel.cubin"
        source.write_text(kernel.source, encoding="utf-8")
        command = toolchain.command(sm, source, built)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=temporary)
        if done.returncode or not built.is_file():
            raise Unsupported(f"nvcc {version(toolchain.nvcc)} cannot build {kernel.label}: {_said(done)}")
        built.replace(cubin)
    return cubin


def _flashinfer_version() -> str:
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
    missing = next((re.search(r"error: (\S+): No such file", line) for line in lines), None)
    if missing:
        return f"header {missing[1]} not found; add the folder that has it to CPLUS_INCLUDE_PATH"
    return lines[0] if lines else f"it ended with {done.returncode}"
