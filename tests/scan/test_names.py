"""Names: demangling, shortening, and which epilogue a CUTLASS GEMM has."""

from __future__ import annotations

import shutil

import pytest

from detaudit.scan import names
from detaudit.scan.names import demangle, finalize_of, shorten, split_arguments

ADD = "_ZN7fixture11scatter_addILi4EfEEvPT0_PKS1_PKi"
GEMM = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<"
    "cutlass::gemm::GroupProblemShape<cute::tuple<long, long, long> >, "
    "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm120<6, 3, cute::tuple<cute::C<1>> >, "
    "cute::tuple<cute::C<128>, cute::C<32>, cute::C<256> >, cutlass::float_e2m1_t>, "
    "cutlass::epilogue::collective::CollectiveEpilogue<cutlass::epilogue::fusion::FusionCallbacks<int, "
    "cutlass::epilogue::fusion::{fusion}<cutlass::layout::RowMajor> > > > >(T::Params)"
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("kernel", "kernel"),
        ("kernel(float*, int)", "kernel"),
        (
            "void fixture::scatter_add<4, float>(float*, float const*, int const*)",
            "fixture::scatter_add<4, float>",
        ),
        (
            "void at::native::(anonymous namespace)::indexFuncLargeIndex<float, long, 2, true, "
            "at::native::ReduceAdd>(at::cuda::detail::TensorInfo<float, long>, long)",
            "at::native::indexFuncLargeIndex<float, long, 2, true, ReduceAdd>",
        ),
        ("void f<(int)4, (bool)1, (ns::Kind)2>(int)", "f<4, 1, 2>"),
        ("void f<-1, 3u, true>(int)", "f<-1, 3u, true>"),
        ("std::enable_if<true, void>::type ns::f<int>(int)", "ns::f<int>"),
        ("void f<ns::g(int)::{lambda(float)#1}>(int)", "f<g>"),
        (
            GEMM.format(fusion="LinearCombination"),
            "cutlass::device_kernel<GemmUniversal, 128x32x256, LinearCombination>",
        ),
        ("_ZN7cutlass13device_kernelINS_4gemmE", "cutlass::device_kernel"),
        ("_Z", "_Z"),
        ("", ""),
    ],
)
def test_shortening(name: str, short: str) -> None:
    assert shorten(name) == short


def test_a_long_name_is_clipped() -> None:
    assert shorten(f"void ns::kernel<{', '.join(['AVeryLongArgument'] * 20)}>(int)").endswith("...")
    assert len(shorten("k" * 500)) == 100


def test_unbalanced_brackets_do_no_harm() -> None:
    for name in ("f<", "f>(", "f<a(b>c)", "operator<<(", "->", "f<a->b>(c)"):
        shorten(name)
    assert split_arguments("<a->b, c<d, e>>") == ["a->b", "c<d, e>"]


@pytest.mark.skipif(names._demangler() is None, reason="no C++ runtime library is installed")
def test_demangling() -> None:
    found = demangle([ADD, "plain", "_Znonsense"])
    assert found == {
        ADD: "void fixture::scatter_add<4, float>(float*, float const*, int const*)",
        "plain": "plain",
        "_Znonsense": "_Znonsense",
    }


def test_without_any_demangler_a_short_name_is_still_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_demangler", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert demangle([ADD]) == {ADD: ADD}
    assert shorten(ADD) == "fixture::scatter_add"


@pytest.mark.parametrize(
    ("fusion", "expected"),
    [
        ("ScaledAccPerRowBiasPerColScaleScatter", "FINALIZE"),
        ("ScaledAccPerColBiasPerRowScaleScatter", "FINALIZE"),
        ("LinearCombination", "NONE"),
    ],
)
def test_the_epilogue_of_a_gemm(fusion: str, expected: str) -> None:
    assert finalize_of(GEMM.format(fusion=fusion)) == expected
    mangled = (
        f"_ZN7cutlass4gemm13GemmUniversalIN6fusion15FusionCallbacksINS1S_{len(fusion)}{fusion}INS_6layout"
    )
    assert finalize_of(mangled) == expected
    assert finalize_of(f"_ZN3foo{len(fusion)}{fusion}IfEEvv") is None
