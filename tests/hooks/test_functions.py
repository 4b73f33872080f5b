"""Listed functions are seen however they were imported, and nothing is imported or left behind for it."""

from __future__ import annotations

import enum
import functools
import gc
import importlib
import json
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from detaudit.core.digest import digest
from detaudit.core.errors import UsageError
from detaudit.hooks.arguments import TensorLayout, bind
from detaudit.hooks.functions import FunctionTap

KERNEL = """
import enum
import functools

class Activation(enum.IntEnum):
    Swiglu = 3

def api(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@api
def moe(x, weights, dtype, scales, output=None, act=Activation.Swiglu, *, fused=None, unset=object()):
    if output is not None:
        output.add_(1)
    if fused == "raise":
        raise ValueError("planned")
    return x * len(scales)

class Plan:
    def run(self, x):
        return x + 1

    @staticmethod
    def make(x):
        return x + 2

    @classmethod
    def build(cls, x):
        return cls, x + 3
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """``fakelib``: ``moe`` is defined in ``fakelib.ops.core`` and re-exported by both packages above it."""
    files = {
        "fakelib/__init__.py": "from .ops import moe\n__version__ = '1.2'",
        "fakelib/ops/__init__.py": "from .core import moe, Plan",
        "fakelib/ops/core.py": KERNEL,
        "fakelib/broken.py": "def late(x): return x\nraise RuntimeError('planned')",
        "fakelib/lazy.py": "def __getattr__(name): raise AssertionError('made on first use: ' + name)",
        "user_of_fakelib.py": "from fakelib.ops.core import moe\nimport fakelib.ops as ops\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = (list(sys.meta_path), list(sys.path_hooks))
    yield "fakelib.ops:moe"
    assert (list(sys.meta_path), list(sys.path_hooks)) == before
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fakelib", "user_of_fakelib")]:
        del sys.modules[name]


def nowhere() -> None:
    return None


def load(name: str) -> Any:
    return importlib.import_module(name)


def call(function: Callable[..., Any], **more: Any) -> Any:
    return function(torch.ones(2), torch.zeros(3), torch.bfloat16, [torch.ones(1), None], **more)


def test_a_function_imported_before_is_seen_through_every_reference(package: str) -> None:
    user, lib = load("user_of_fakelib"), load("fakelib")
    original = user.moe

    class Holder:
        static = staticmethod(original)

        def __init__(self) -> None:
            self.kernel = original

    def default(kernel: Callable[..., Any] = original) -> Callable[..., Any]:
        return kernel

    holder, table, listed, bound = Holder(), {"moe": original}, [original], functools.partial(original)
    captured = original
    closure = lambda: captured  # noqa: E731
    ways: list[Callable[[], Callable[..., Any]]] = [
        lambda: user.moe,
        lambda: user.ops.moe,
        lambda: lib.moe,
        lambda: lib.ops.core.moe,
        lambda: holder.kernel,
        lambda: holder.static,
        lambda: table["moe"],
        lambda: listed[0],
        lambda: bound,
        closure,
        default,
    ]
    with FunctionTap([package], nowhere) as tap:
        for way in ways:
            call(way())
    assert len(tap.calls) == len(ways)
    for way in ways:
        call(way())
    assert len(tap.calls) == len(ways)
    assert [way() for way in ways if way() is not bound] == [original] * (len(ways) - 1)
    assert bound.func is original


def test_a_module_is_never_imported_for_the_tap(package: str) -> None:
    with FunctionTap([package, "fakelib.lazy:made"], nowhere) as tap:
        assert "fakelib" not in sys.modules
        assert list(tap.unseen) == [package, "fakelib.lazy:made"]
        load("fakelib.lazy")
        assert list(tap.unseen) == ["fakelib.lazy:made"]


def test_a_function_imported_while_the_tap_is_on_is_seen_and_put_back(package: str) -> None:
    with FunctionTap([package], nowhere) as tap:
        user, lib = load("user_of_fakelib"), load("fakelib")
        mine = lib.moe
        for function in (user.moe, lib.moe, lib.ops.moe, lib.ops.core.moe, mine):
            call(function)
        loader = lib.ops.__spec__.loader
        assert "exec_module" not in vars(loader)
    assert len(tap.calls) == 5
    assert tap.calls[0].entry == package
    assert user.moe is lib.moe is lib.ops.moe is lib.ops.core.moe
    assert not hasattr(user.moe.__wrapped__, "__wrapped__")  # only the package's own decorator is left


def test_a_reference_out_of_reach_only_forwards(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package], nowhere) as tap:
        pair = (lib.moe, 1)
        call(pair[0])
    assert pair[0] is not lib.moe
    assert torch.equal(call(pair[0]), torch.full((2,), 2.0))
    assert len(tap.calls) == 1


def test_a_tap_can_be_used_again(package: str) -> None:
    lib = load("fakelib")
    tap = FunctionTap([package], nowhere)
    for _ in range(2):
        with tap:
            call(lib.moe)
    assert len(tap.calls) == 2


def test_module_globals_hidden_from_the_collector_are_reached(package: str) -> None:
    lib = load("fakelib")
    gc.freeze()
    try:
        with FunctionTap([package], nowhere) as tap:
            call(lib.moe)
    finally:
        gc.unfreeze()
    assert len(tap.calls) == 1


def test_arguments_get_their_names_and_parameters_are_json(package: str) -> None:
    lib = load("fakelib")
    x = torch.ones(2, 3).t()
    with FunctionTap([package], lambda: ("layers.0.experts", 4)) as tap:
        lib.moe(x, torch.zeros(3), torch.bfloat16, [torch.ones(1), None, torch.ones(2)], fused=True)
        lib.moe(x, x, torch.float8_e4m3fn, [], act=lib.ops.core.Activation.Swiglu)
    first, second = tap.calls
    assert (first.module, first.call, first.entry) == ("layers.0.experts", 4, package)
    assert list(first.tensors) == ["x", "weights", "scales[0]", "scales[2]"]
    assert first.parameters == {"dtype": "bfloat16", "scales[1]": None, "fused": True}
    assert second.parameters == {"dtype": "float8_e4m3fn", "scales": [], "act": "Swiglu"}
    assert first.context["library"] == "fakelib"
    assert first.context["version"] == "1.2"
    defaults = first.context["defaults"]
    assert defaults == {"output": None, "act": "Swiglu", "unset": {"object": "builtins.object"}}
    json.dumps([first.parameters, dict(first.context)], allow_nan=False)
    layout = first.tensors["x"]
    assert isinstance(layout, TensorLayout)
    assert (layout.dtype, layout.shape, layout.strides) == ("float32", (3, 2), (1, 3))
    assert layout.alignment >= 16


def test_kept_tensors_are_those_before_the_call_and_alias_as_before(package: str) -> None:
    lib = load("fakelib")
    memory = torch.zeros(8)
    with FunctionTap(
        [package], lambda: ("m", 1), keep=lambda entry, at: at == ("m", 1), keep_bytes=100
    ) as tap:
        lib.moe(memory[:4], memory[4:], None, [], output=memory)
    tensors: dict[str, Any] = dict(tap.calls[0].tensors)
    assert memory.tolist() == [1] * 8
    assert digest(tensors["output"]) == digest(torch.zeros(8))
    tensors["output"].fill_(7)
    assert tensors["weights"].tolist() == [7] * 4
    assert tensors["weights"].storage_offset() == 4


def test_the_byte_budget_is_kept_and_the_reason_given(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package], nowhere, keep=lambda *_: True, keep_bytes=50) as tap:
        for _ in range(2):
            lib.moe(torch.ones(8), None, None, [])
    first, second = tap.calls
    assert isinstance(first.tensors["x"], torch.Tensor)
    assert isinstance(second.tensors["x"], TensorLayout)
    assert second.context["not_kept"] == "its 32 bytes are more than the 18 left of the limit"


def test_exceptions_pass_unchanged_and_the_call_is_seen(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package], nowhere) as tap, pytest.raises(ValueError, match=r"^planned$"):
        call(lib.moe, fused="raise")
    with tap, pytest.raises(TypeError, match="missing 3 required"):
        lib.moe(torch.ones(1))
    assert len(tap.calls) == 2
    assert list(tap.calls[1].tensors) == ["args[0]"]
    with pytest.raises(RuntimeError, match="planned"), FunctionTap(["fakelib.broken:late"], nowhere):
        load("fakelib.broken")
    assert "fakelib.broken" not in sys.modules


def test_a_fault_while_recording_does_not_reach_the_target(package: str) -> None:
    lib = load("fakelib")

    def broken() -> tuple[str, int]:
        raise LookupError("planned")

    with FunctionTap([package], broken) as tap:
        assert torch.equal(call(lib.moe), torch.full((2,), 2.0))
    assert tap.problems == {package: "a call was not recorded (LookupError: planned)"}


def test_methods_of_every_kind(package: str) -> None:
    plan = load("fakelib.ops").Plan
    before = dict(vars(plan))
    names = ["run", "make", "build"]
    with FunctionTap([f"fakelib.ops:Plan.{name}" for name in names], nowhere) as tap:
        assert plan().run(torch.zeros(1)).item() == 1
        assert plan.make(torch.zeros(1)).item() == 2
        assert plan.build(torch.zeros(1))[0] is plan
    assert [c.entry.rpartition(".")[2] for c in tap.calls] == names
    assert dict(vars(plan)) == before


def test_one_function_listed_under_two_names_is_recorded_once(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package, "fakelib.ops.core:moe"], nowhere) as tap:
        call(lib.ops.core.moe)
        assert tap.unseen == ()
    assert [c.entry for c in tap.calls] == [package]


def test_context_is_asked_per_entry_and_may_fail(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package], nowhere, context={package: lambda: {"tuned": True}}) as tap:
        call(lib.moe)
    with FunctionTap([package], nowhere, context={package: lambda: 1 / 0}) as failing:  # type: ignore[dict-item,return-value]
        call(lib.moe)
    assert tap.calls[0].context["tuned"] is True
    assert len(failing.calls) == 1


def test_the_tap_steps_aside_while_compiling(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap(["fakelib.ops:Plan.make"], nowhere) as tap:
        compiled = torch.compile(lambda x: lib.ops.Plan.make(x) * 2, backend="eager", fullgraph=True)
        assert compiled(torch.ones(1)).item() == 6
    assert tap.calls == []
    torch._dynamo.reset()


def test_calls_from_several_threads(package: str) -> None:
    lib = load("fakelib")
    with FunctionTap([package], nowhere) as tap:
        threads = [threading.Thread(target=lambda: [call(lib.moe) for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(tap.calls) == 200


@pytest.mark.parametrize("entry", ["moe", "a:", ":b", "a:b.c.d", "a b:c", "a:b-c"])
def test_entries_that_name_no_function_are_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="module:function"):
        FunctionTap([entry], nowhere)


def test_a_class_is_no_function(package: str) -> None:
    load("fakelib")
    with FunctionTap(["fakelib.ops:Plan"], nowhere) as tap:
        assert tap.problems == {"fakelib.ops:Plan": "it is a type, not a function"}


def test_a_builtin_without_a_signature_is_bound_by_position() -> None:
    class Colour(enum.Enum):
        RED = 1

    arguments = bind(None, (torch.ones(1), Colour.RED, float("inf")), {"device": torch.device("cpu")})
    assert list(arguments.tensors) == ["args[0]"]
    assert arguments.parameters == {"args[1]": "RED", "args[2]": "inf", "device": "cpu"}
