from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from detaudit.core.digest import digest
from detaudit.core.numbers import difference
from detaudit.core.records import VariantResult
from detaudit.kernels import comparison
from detaudit.kernels.comparison import Agreement, Comparison, Ring, as_words
from detaudit.kernels.runner import FILLS, run_variants
from tests.kernels.fakes import (
    FakeBackend,
    FakeVariant,
    Kernel,
    candidate,
    control,
    failing,
    fake_case,
    output,
    racy,
    reads_its_output,
    stable,
)


def run(*fakes: FakeVariant, runs: int = 9, backend: FakeBackend | None = None) -> tuple[VariantResult, ...]:
    backend = backend or FakeBackend(fakes)
    variants = [fake.variant() for fake in backend.fakes]
    return run_variants(backend, fake_case(), variants, runs=runs)


def compare(outputs: list[Tensor]) -> Agreement:
    ring = Ring(outputs[0])
    collected = Comparison(outputs[0], "zeros", ring)
    for tensor in outputs[1:]:
        if collected.full:
            collected.flush()
        collected.add(tensor, "zeros")
    collected.flush()
    return collected.result()


def test_a_stable_variant_has_the_bound_of_its_runs() -> None:
    (result,) = run(candidate(stable, asked=True), runs=300)
    assert (result.runs, result.runs_differing, result.distinct) == (300, 0, 1)
    assert result.bound == pytest.approx(1 - 0.05 ** (1 / 300))
    assert (result.max_ulp, result.max_abs, result.rows_differing, result.rows_total) == (0, 0.0, 0, 4)
    assert (result.tactic, result.fused, result.can_fuse) == ("tactic of unfused", False, False)
    assert result.digest == digest(output()).root.hex()
    assert result.ratio == 1.0
    assert result.reason is None
    assert result.note is None


def test_a_racy_variant_is_counted_exactly() -> None:
    (result,) = run(control(racy), runs=9)
    outputs = [racy(i, output()) for i in range(10)]
    gaps = [difference(outputs[0], other) for other in outputs[1:]]
    assert (result.runs, result.runs_differing, result.distinct) == (9, 9, 10)
    assert result.max_ulp == max(gap.max_ulp for gap in gaps)
    assert result.max_abs == max(gap.max_abs for gap in gaps)
    assert (result.rows_differing, result.rows_total) == (4, 4)
    assert result.bound == 1.0
    assert result.note is None


def test_a_rare_race_is_caught_in_any_place() -> None:
    def rare(at: int) -> Kernel:
        return lambda run, buffer: racy(1, buffer) if run == at else stable(run, buffer)

    for at in (1, 31, 32, 33, 77):
        (result,) = run(control(rare(at)), runs=77)
        assert (result.runs_differing, result.distinct, result.rows_differing) == (1, 2, 1)
        assert result.note is None


def test_a_first_run_that_is_alone_makes_all_others_differ() -> None:
    (result,) = run(candidate(lambda run, buffer: racy(0 if run == 0 else 1, buffer)), runs=20)
    assert (result.runs_differing, result.distinct) == (20, 2)


def test_reading_the_output_buffer_is_told_from_a_race() -> None:
    (result,) = run(candidate(reads_its_output), runs=12)
    assert result.runs_differing > 0
    assert result.note is not None
    assert "dirty-output-buffer" in result.note


def test_a_variant_that_fails_keeps_what_it_showed_and_the_others_go_on() -> None:
    batch = comparison.BATCH
    first, second = run(candidate(failing(after=batch + 8)), control(racy), runs=2 * batch - 4)
    assert first.runs == batch
    assert first.reason == (
        f"RuntimeError after {batch} runs: CUDA error: an illegal memory access was encountered"
    )
    assert (second.runs, second.reason) == (2 * batch - 4, None)


def test_a_variant_that_never_starts_has_a_reason_and_no_numbers() -> None:
    broken = FakeBackend([candidate(stable), control(failing(after=0))], fails_to_prepare="unfused")
    unprepared, raised = run(backend=broken)
    for result in (unprepared, raised):
        assert (result.runs, result.distinct, result.max_ulp, result.median_ms) == (0, 0, None, None)
        assert result.bound == 1.0
        assert result.digest is None
    assert unprepared.reason == "ValueError before its first output: no such tactic"


def test_an_output_that_changes_shape_is_a_failure_not_a_difference() -> None:
    (result,) = run(candidate(lambda run, _: output()[: 4 - run % 2]))
    assert result.runs == 0
    assert "changed to torch.bfloat16 (3, 6)" in str(result.reason)


def test_a_kernel_that_changes_its_input_is_not_accused_of_racing() -> None:
    case = fake_case(x=torch.zeros(4))

    def changes_input(run: int, buffer: Tensor) -> Tensor:
        case.tensors["x"].add_(1)
        return racy(run, buffer)

    backend = FakeBackend([candidate(changes_input)])
    (result,) = run_variants(backend, case, [backend.fakes[0].variant()], runs=3)
    assert result.runs == 0
    assert "changes its argument x" in str(result.reason)


def test_every_run_is_poisoned_and_the_patterns_take_turns() -> None:
    backend = FakeBackend([candidate(stable)])
    run(backend=backend, runs=7)
    events = [event.removeprefix("unfused:") for event in backend.log if "enter" not in event]
    events = [event for event in events if event != "exit"]
    assert events[0::2] == [FILLS[i % 3] for i in range(8)]
    assert events[1::2] == ["run"] * 8


def test_variants_take_turns_and_are_active_only_then() -> None:
    backend = FakeBackend([candidate(stable), control(failing(after=comparison.BATCH + 8))])
    run(backend=backend, runs=2 * comparison.BATCH)
    turns = [event for event in backend.log if event.endswith((":enter", ":exit"))]
    assert turns[:8] == ["unfused:enter", "unfused:exit", "pinned:enter", "pinned:exit"] * 2
    assert all(a.split(":")[0] == b.split(":")[0] for a, b in list(pairwise(turns))[::2])
    assert turns.count("pinned:enter") == turns.count("pinned:exit") == 3


def test_times_are_ratios_to_the_asked_variant() -> None:
    def slow(run: int, buffer: Tensor) -> Tensor:
        torch.randn(400, 400) @ torch.randn(400, 400)
        return stable(run, buffer)

    asked, other = run(candidate(stable, asked=True), candidate(slow, "slow"), runs=30)
    assert asked.ratio == 1.0
    assert asked.median_ms is not None
    assert other.median_ms is not None
    assert other.ratio == pytest.approx(other.median_ms / asked.median_ms)
    assert other.ratio is not None
    assert other.ratio > 1.0


def test_without_an_asked_variant_there_is_no_ratio() -> None:
    (result,) = run(candidate(stable))
    assert result.median_ms is not None
    assert result.ratio is None


def test_the_error_is_relative_to_the_fp64_reference() -> None:
    exact = output().double()
    (result,) = run(backend=FakeBackend([candidate(stable)], reference=exact * 1.25))
    assert result.rel_error == pytest.approx(0.2)
    for useless in (exact[:1], torch.zeros_like(exact)):
        (result,) = run(backend=FakeBackend([candidate(stable)], reference=useless))
        assert result.rel_error is None


def test_progress_comes_to_its_end() -> None:
    seen: list[tuple[int, int]] = []
    backend = FakeBackend([candidate(stable), control(failing(after=0))])
    run_variants(
        backend,
        fake_case(),
        [fake.variant() for fake in backend.fakes],
        runs=50,
        progress=lambda _label, done, total: seen.append((done, total)),
    )
    assert seen[0] == (0, 100)
    assert seen[-1] == (100, 100)
    assert seen == sorted(seen)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    run(control(racy))
    assert torch.equal(torch.get_rng_state(), before)


SPECIAL = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 65504.0, 1e-7, -1.5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_extremes_agree_with_comparing_every_pair(dtype: torch.dtype, data: st.DataObject) -> None:
    rows, columns, count = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(2, 40)))
    value = st.sampled_from(SPECIAL)
    cells = st.lists(value, min_size=rows * columns, max_size=rows * columns)
    pool = data.draw(st.lists(cells, min_size=1, max_size=3))
    outputs = [
        torch.tensor(data.draw(st.sampled_from(pool)), dtype=dtype).view(rows, columns) for _ in range(count)
    ]
    gaps = [difference(outputs[0], other) for other in outputs[1:]]
    agreement = compare(outputs)
    keys = {bytes(as_words(tensor).view(torch.uint8).tolist()) for tensor in outputs}
    assert agreement.runs == count - 1
    assert agreement.distinct == len(keys)
    assert agreement.runs_differing == sum(gap.elements_differing > 0 for gap in gaps)
    assert agreement.rows_differing == len({row for gap in gaps for row in gap.rows})
    assert agreement.max_abs == max(gap.max_abs for gap in gaps)
    assert agreement.max_ulp == max(gap.max_ulp for gap in gaps)


def test_minus_zero_and_nan_payloads_are_differences() -> None:
    zeros = torch.zeros(2, 3)
    agreement = compare([zeros, -zeros])
    assert (agreement.runs_differing, agreement.max_ulp, agreement.max_abs) == (1, 0, 0.0)
    assert agreement.rows_differing == 2
    nan = torch.full((3,), math.nan)
    payload = (nan.view(torch.int32) + 1).view(torch.float32)
    assert compare([nan, payload, nan]).runs_differing == 1


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float8_e4m3fn, (3, 5)),
        (torch.float4_e2m1fn_x2, (3, 5)),
        (torch.int32, (7,)),
        (torch.bool, (2, 3)),
        (torch.complex64, (2, 3)),
        (torch.complex128, (3,)),
        (torch.bfloat16, ()),
        (torch.float32, (2, 0)),
    ],
    ids=str,
)
def test_every_dtype_and_shape_is_compared_by_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    first = raw.view(dtype).view(shape)
    assert compare([first, first.clone()]).runs_differing == 0
    if raw.numel():
        other = raw.clone()
        other[-1] = 1
        agreement = compare([first, other.view(dtype).view(shape), first])
        assert (agreement.runs_differing, agreement.distinct, agreement.rows_differing) == (1, 2, 1)
        assert agreement.rows_total == math.prod(shape[:-1])


def test_an_output_larger_than_the_ring_is_compared_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "RING_BYTES", 8)
    first = torch.arange(6.0).view(2, 3)
    other = first + torch.tensor([0.0, 0.0, 1.0])
    assert Ring(first).capacity == 1
    agreement = compare([first, other, first, other])
    assert (agreement.runs, agreement.runs_differing, agreement.distinct) == (3, 2, 2)


def test_transposed_outputs_are_compared_by_their_elements() -> None:
    first = torch.arange(6.0).view(2, 3)
    assert compare([first, first.t().contiguous().t()]).runs_differing == 0


def test_digests_see_the_order_of_elements() -> None:
    first = torch.zeros(1, 64, dtype=torch.int32)
    swapped = [first.clone() for _ in range(64)]
    for place, tensor in enumerate(swapped):
        tensor[0, place] = -(2**31)
    assert compare([first, *swapped]).distinct == 65


def test_a_device_lost_to_a_failed_kernel_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_self: Comparison) -> Agreement:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Comparison, "result", lost)
    (result,) = run(control(racy))
    assert (result.runs, result.max_ulp, result.digest) == (0, None, None)
    assert "device-side assert" in str(result.reason)
