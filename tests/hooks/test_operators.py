"""The operator tap names the operator that races, and changes nothing of what it watches."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from detaudit.core.digest import HostDigester, digest
from detaudit.core.recording import CallKey, Value
from detaudit.hooks.operators import Operator, OperatorDifference, OperatorTap, first_differing, within
from detaudit.hooks.recorder import Recorder
from tests.support import HIDDEN, TOKENS, LateDigester, LeftOver, Mixture, overwrite

HERE = ("experts", 0)


def record(function: Callable[[], object]) -> list[Operator]:
    digester = HostDigester()
    tap = OperatorTap(digester, lambda: HERE)
    with tap:
        function()
    digester.finish()
    return tap.operators()


def record_experts(model: Mixture, x: Tensor) -> list[Operator]:
    """The operators inside ``experts``, while the recorder digests every call around them."""
    digester = LateDigester()
    recorder = Recorder(digester)
    recorder.attach(model)
    tap = OperatorTap(digester, within(recorder.current_call, {"experts"}))
    with torch.no_grad(), recorder.run(), tap:
        model(x)
    return tap.operators()


@pytest.mark.usefixtures("racy")
def test_the_racing_operator_is_named() -> None:
    torch.manual_seed(0)
    racing, stable, x = Mixture(racing=True), Mixture(racing=False), torch.randn(TOKENS, HIDDEN)
    runs = [record_experts(racing, x) for _ in range(6)]
    assert {op.module for run in runs for op in run} == {"experts"}
    found = {first_differing(a, b) for a, b in combinations(runs, 2)} - {None}
    assert len(found) == 1
    (difference,) = found
    assert isinstance(difference, OperatorDifference)
    assert (difference.operator, difference.kind) == ("aten.index_put_.default", "outputs")
    assert (difference.module, difference.call, difference.occurrence) == ("experts", 0, 0)
    assert difference.sites == ("mutated.args[0]",)
    steady = [record_experts(stable, x) for _ in range(3)]
    assert [first_differing(a, b) for a, b in combinations(steady, 2)] == [None] * 3


def backward(x: Tensor) -> None:
    x.sum().backward()  # type: ignore[no-untyped-call]


def work(x: Tensor) -> Tensor:
    hidden = torch.nn.functional.layer_norm(x @ x.T, (x.shape[0],))
    hidden = hidden.index_add(0, torch.tensor([0, 0]), hidden[:2])
    return hidden.softmax(-1).cumsum(0)


def test_numbers_are_the_same_with_the_tap_on() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    results: list[list[Value]] = []
    for watch in (False, True):
        x.grad = None
        if watch:
            record(lambda: backward(work(x).square()))
        else:
            backward(work(x).square())
        assert x.grad is not None
        results.append([digest(work(x).detach()), digest(x.grad)])
    assert results[0] == results[1]


def test_forward_and_backward_operators_are_recorded_in_order() -> None:
    weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3)
    operators = record(lambda: backward(x @ weight))
    names = [op.name for op in operators]
    assert names[:2] == ["aten.mm.default", "aten.sum.default"]
    assert names.index("aten.mm.default", 1) > names.index("aten.expand.default")
    assert [op.index for op in operators] == list(range(len(operators)))
    with torch.inference_mode():
        watched = record(lambda: torch.relu(x @ weight.detach()))
    # Newer releases of torch keep matmul whole here, older ones take it apart.
    products = {"aten.matmul.default", "aten.mm.default"}
    assert products & {op.name for op in watched}
    assert watched[-1].name == "aten.relu.default"


def test_inputs_are_taken_before_and_changes_in_place_after() -> None:
    x = torch.zeros(3)
    (add,) = record(lambda: x.add_(1))
    assert dict(add.inputs)["args[0]"] == digest(torch.zeros(3))
    assert dict(add.outputs) == {"mutated.args[0]": digest(torch.ones(3))}
    out = torch.empty(3)
    (into,) = record(lambda: torch.add(x, x, out=out))
    assert "kwargs.out" not in dict(into.inputs)
    assert dict(into.outputs)["mutated.kwargs.out"] == digest(torch.full((3,), 2.0))


def test_only_operators_inside_the_asked_modules_are_recorded() -> None:
    stack: list[tuple[str, int]] = []
    tap = OperatorTap(HostDigester(), within(lambda: stack[-1] if stack else None, {"a.b"}))
    with tap:
        torch.ones(1)
        for path in ("a", "a.b", "a.b.c", "a.bc"):
            stack.append((path, 7))
            torch.zeros(1)
    assert [(op.module, op.call, op.name) for op in tap.operators()] == [
        ("a.b", 7, "aten.zeros.default"),
        ("a.b.c", 7, "aten.zeros.default"),
    ]


def test_the_root_holds_every_module() -> None:
    assert within(lambda: ("layers.0", 0), {""})() == ("layers.0", 0)
    assert within(lambda: None, {""})() is None


def test_an_exception_passes_and_leaves_no_mode() -> None:
    tap = OperatorTap(HostDigester(), lambda: HERE)
    with pytest.raises(RuntimeError, match="size of tensor"), tap:
        torch.ones(2) + torch.ones(3)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert [(op.name, op.error) for op in tap.operators()][-1] == ("aten.add.Tensor", "RuntimeError")


def test_random_operators_have_the_generator_state_as_input() -> None:
    runs = [record(lambda: nn.functional.dropout(torch.ones(64), 0.5)) for _ in range(2)]
    assert runs[0][-1].outputs != runs[1][-1].outputs
    difference = first_differing(*runs)
    assert difference is not None
    assert (difference.kind, difference.operator) == ("host", "aten.bernoulli_.float")
    assert difference.sites == ("rng.cpu",)
    private = torch.Generator().manual_seed(3)
    draws = [record(lambda: torch.rand(4, generator=private)) for _ in range(2)]
    between = first_differing(*draws)
    assert between is not None
    assert between.sites == ("kwargs.generator",)


def between_fills(function: Callable[[], object]) -> OperatorDifference | None:
    def run(fill: int) -> list[Operator]:
        with LeftOver(lambda: fill):
            return record(function)

    return first_differing(run(1), run(2))


def test_uninitialised_memory_is_no_output_and_shows_where_it_is_read() -> None:
    def read() -> Tensor:
        memory = torch.empty(8)
        return torch.empty_like(memory).copy_(memory.view(2, 4).flatten()) * 2

    difference = between_fills(read)
    assert difference is not None
    assert (difference.operator, difference.kind, difference.sites) == (
        "aten.copy_.default",
        "unwritten",
        ("args[1]",),
    )


def test_memory_that_is_written_in_part_is_uninitialised_in_the_rest() -> None:
    def read() -> Tensor:
        memory = torch.empty(8, dtype=torch.float64)
        memory[:5] = torch.arange(5.0)
        return memory.sum()

    difference = between_fills(read)
    assert difference is not None
    assert (difference.operator, difference.kind) == ("aten.sum.default", "unwritten")


def test_memory_that_something_else_wrote_to_is_not_uninitialised() -> None:
    def run(fill: int, make: Callable[[int], Tensor]) -> list[Operator]:
        def read() -> Tensor:
            memory = make(8)
            overwrite(memory[2:], fill)  # such as a kernel that is called directly
            return memory * 2

        return record(read)

    for make in (torch.empty, torch.zeros):
        difference = first_differing(run(1, make), run(2, make))
        assert difference is not None
        assert (difference.operator, difference.kind) == ("aten.mul.Tensor", "changed")


def test_tensors_made_where_nothing_is_recorded_are_not_uninitialised() -> None:
    def run(fill: int) -> list[Operator]:
        at: CallKey | None = None
        tap = OperatorTap(HostDigester(), lambda: at)
        with LeftOver(lambda: fill), tap:
            outside = torch.empty(8)
            at = HERE
            with ThreadPoolExecutor(1) as pool:
                elsewhere = pool.submit(torch.full, (8,), float(fill)).result()
            outside + 1
            elsewhere * 2
        return tap.operators()

    a, b = run(1), run(2)
    assert first_differing(a, b) == OperatorDifference("aten.add.Tensor", *HERE, 0, 0, "inputs", ("args[0]",))
    assert first_differing(a[1:], b[1:]) == OperatorDifference(
        "aten.mul.Tensor", *HERE, 1, 0, "inputs", ("args[0]",)
    )


def test_memory_is_told_from_other_memory_at_its_former_place() -> None:
    def read() -> Tensor:
        for _ in range(3000):
            torch.empty(8)
        return torch.zeros(8) + 1

    assert between_fills(read) is None


def test_host_values_are_no_uninitialised_memory() -> None:
    x = torch.ones(4)
    for run, operator, site in (
        (lambda n: lambda: x + n, "aten.add.Tensor", "args[1]"),
        (lambda n: lambda: torch.full((4,), n), "aten.full.default", "args[1]"),
        (lambda n: lambda: torch.tensor([n, 1.0]), "aten.lift_fresh.default", "args[0]"),
    ):
        difference = first_differing(record(run(2.0)), record(run(3.0)))
        assert difference is not None
        assert (difference.kind, difference.operator, difference.sites) == ("host", operator, (site,))


def test_another_sequence_is_told_where_it_begins() -> None:
    x = torch.ones(2)
    a, b, c = record(lambda: x.sin().cos()), record(lambda: x.sin().tan()), record(lambda: x.sin())
    for one, other, name in ((a, b, "cos"), (a, c, "cos"), (c, a, "cos")):
        difference = first_differing(one, other)
        assert difference is not None
        assert (difference.kind, difference.operator, difference.index) == (
            "sequence",
            f"aten.{name}.default",
            1,
        )


def test_a_custom_operator_that_writes_against_its_schema_is_seen() -> None:
    library = torch.library.Library("detaudit_test_operators", "DEF")  # type: ignore[no-untyped-call]
    library.define("sneaky(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("sneaky", lambda x: x.add_(1).clone(), "CPU")  # type: ignore[no-untyped-call]
    x = torch.zeros(2)
    (seen,) = record(lambda: torch.ops.detaudit_test_operators.sneaky(x))
    assert seen.name == "detaudit_test_operators.sneaky.default"
    assert dict(seen.outputs)["mutated.args[0]"] == digest(torch.ones(2))
    library._destroy()  # type: ignore[no-untyped-call]


def test_compiled_code_stays_compiled_and_its_compilation_unseen() -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: (x.sin() + 1).cos(), backend=backend)
    names = [op.name for op in record(lambda: compiled(torch.ones(3)))]
    assert len(graphs) == 1
    assert names == ["aten.ones.default", "aten.sin.default", "aten.add.Tensor", "aten.cos.default"]
    torch._dynamo.reset()


def test_what_is_beyond_the_limit_is_counted() -> None:
    tap = OperatorTap(HostDigester(), lambda: HERE, limit=2)
    with tap:
        for _ in range(5):
            torch.ones(1)
    assert (len(tap.operators()), tap.dropped) == (2, 3)
