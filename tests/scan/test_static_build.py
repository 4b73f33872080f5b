"""Choosing and building FlashInfer's kernels for a GPU that is not here; nvcc is played by a script."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from detaudit.core.errors import Unsupported
from detaudit.scan import static_build
from detaudit.scan.static_build import (
    ARCHITECTURES,
    Kernel,
    Toolchain,
    build,
    choose,
    find_toolchain,
    kernels_in,
)
from detaudit.scan.tools import package_path
from tests.scan.support import BARE

GENERATED = """
#if defined(ENABLE_FP4) && defined(ENABLE_FP4)
        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm120, SafeFP4, SafeFP4, {out},
        void, EpilogueOpDefault, {fusion},
        128, {n}, 128, 1, 1, 1,
        {mx}, false, false, {swapped});
#endif
"""


def generated(
    fusion: str, n: int = 32, *, swapped: str = "false", out: str = "__nv_bfloat16", mx: str = "false"
) -> str:
    return GENERATED.format(fusion=fusion, n=n, swapped=swapped, out=out, mx=mx)


def test_kernels_are_read_from_generated_sources() -> None:
    (kernel,) = kernels_in([generated("FINALIZE", 64, swapped="true")])
    assert (kernel.fusion, kernel.tile) == ("FINALIZE", (128, 64, 128))
    assert kernel.label == "FINALIZE 128x64x128, A and B swapped"
    assert kernels_in([kernel.source]) == [kernel]


def toolchain(tmp_path: Path, script: str) -> Toolchain:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return Toolchain(nvcc, (), tmp_path)


def chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: int, dtype: str = "nvfp4"
) -> list[Kernel]:
    monkeypatch.setattr(static_build, "_generated", lambda *_: [text])
    return choose(toolchain(tmp_path, ""), "120", dtype, limit)


def test_pairs_are_equal_in_all_but_the_fusion_and_the_smallest_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(
        generated(fusion, n, out=out)
        for n in (128, 32, 64)
        for fusion in ("NONE", "FINALIZE")
        for out in ("half", "__nv_bfloat16")
    )
    text += generated("FINALIZE", 16) + generated("NONE", 8, mx="true") + generated("FINALIZE", 8, mx="true")
    kernels = chosen(tmp_path, monkeypatch, text, 2)
    assert [kernel.label for kernel in kernels] == [
        "FINALIZE 128x32x128",
        "NONE 128x32x128",
        "FINALIZE 128x64x128",
        "NONE 128x64x128",
    ]
    assert {kernel.arguments[3] for kernel in kernels} == {"__nv_bfloat16"}


def test_a_type_that_flashinfer_does_not_fuse_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unsupported, match="no bf16 GEMM with a fused finalize for SM120"):
        chosen(tmp_path, monkeypatch, generated("FINALIZE") + generated("NONE"), 1, "bf16")


def test_an_unknown_architecture_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="--sm 42 is not known here; it can be 90, 100"):
        choose(toolchain(tmp_path, ""), "42", "nvfp4", 1)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize(
    ("sm", "dtype"), [("90", "bf16"), ("100", "nvfp4"), ("120", "nvfp4"), ("121", "nvfp4")]
)
def test_the_installed_flashinfer_has_pairs(sm: str, dtype: str, tmp_path: Path) -> None:
    flashinfer = package_path("flashinfer")
    assert flashinfer is not None
    if not (flashinfer / "jit" / "gemm" / "cutlass" / "generate_kernels.py").is_file():
        pytest.skip("this FlashInfer keeps its generator elsewhere")
    finalize, none = choose(Toolchain(tmp_path, (), flashinfer), sm, dtype, 1)
    assert (finalize.fusion, none.fusion, finalize.tile) == ("FINALIZE", "NONE", none.tile)
    assert finalize.arguments[0] == f"Sm{'120' if sm == '121' else sm}"


COPIES = f'echo compiled >> "$0.log"; for last; do :; done; cp {BARE} "$last"'


def test_built_kernels_are_kept(tmp_path: Path) -> None:
    chain = toolchain(tmp_path, COPIES)
    kernels = kernels_in([generated("FINALIZE"), generated("NONE")])
    steps: list[int] = []
    first = build(chain, "120", kernels, tmp_path / "kept", lambda: steps.append(1), jobs=2)
    assert [path.read_bytes() for path in first] == [BARE.read_bytes()] * 2
    assert first[0].name.startswith("finalize-128x32x128-")
    assert first[1].name.startswith("none-128x32x128-")
    assert build(chain, "120", kernels, tmp_path / "kept") == first
    # Asked for its version too, for the name of the file.
    assert len((tmp_path / "nvcc.log").read_text().split()) - 1 == len(steps) == 2
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == sorted(path.name for path in first)


def test_the_command_names_the_architecture_and_flashinfers_macros(tmp_path: Path) -> None:
    for sm in ARCHITECTURES:
        command = toolchain(tmp_path, "").command(sm, Path("k.cu"), Path("k.cubin"))
        assert f"-gencode=arch=compute_{sm}a,code=sm_{sm}a" in command
        assert ("-DCOMPILE_HOPPER_TMA_GROUPED_GEMMS" in command) == (sm == "90")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("kernel.cu:1:10: fatal error: cuda_fp4.h: No such file or directory", "header cuda_fp4.h not found"),
        ("nvcc fatal : error: Unsupported gpu architecture", "Unsupported gpu architecture"),
        ("", "it ended with 2"),
    ],
)
def test_a_compiler_that_fails_says_why_in_one_line(said: str, expected: str, tmp_path: Path) -> None:
    chain = toolchain(tmp_path, f"echo '{said}' >&2; exit 2")
    with pytest.raises(Unsupported) as caught:
        build(chain, "120", kernels_in([generated("FINALIZE")]), tmp_path / "kept")
    assert re.search(rf"cannot build FINALIZE 128x32x128: .*{expected}", str(caught.value))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "kept").iterdir()) == []


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_build, "package_path", lambda _: None)
    with pytest.raises(Unsupported, match="pip install flashinfer-python"):
        find_toolchain()


def test_without_a_compiler_or_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "csrc").mkdir(parents=True)
    monkeypatch.setattr(static_build, "package_path", lambda name: tmp_path if name == "flashinfer" else None)
    monkeypatch.setattr(static_build, "_cuda_folders", lambda name: [tmp_path / name])
    with pytest.raises(Unsupported, match=r"nvcc not found.*install the CUDA toolkit"):
        find_toolchain()
    for folder in ("bin", "include/crt"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin" / "nvcc").touch()
    headers = {"cuda_runtime.h": "nvidia-cuda-runtime", "cuda_fp8.h": "nvidia-cuda-runtime"}
    headers |= {"crt/host_config.h": "nvidia-cuda-crt", "cublasLt.h": "nvidia-cublas"}
    for header, package in headers.items():
        with pytest.raises(Unsupported, match=f"{header} not found; pip install {package}"):
            find_toolchain()
        (tmp_path / "include" / header).touch()
    assert find_toolchain().nvcc == tmp_path / "bin" / "nvcc"
