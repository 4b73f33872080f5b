"""The device digest on a GPU: the host's bits, no waiting, no races of its own, in graphs too."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from detaudit.core.digest import HostDigester, NotObservable, digest, dtype_name, host_bytes, make_digester
from detaudit.core.geometry import ITEM_BYTES
from detaudit.core.recording import Value
from tests.core.plain_digest import plain_digests, plain_root

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU", allow_module_level=True)

from detaudit.core.device import driver
from detaudit.core.device import queue as queues
from detaudit.core.device.digester import DeviceDigester
from detaudit.core.device.queue import CapturedPending, DevicePending

pytestmark = pytest.mark.gpu

QUANTIZED = {"qint8", "quint8", "quint4x2", "quint2x4", "qint32"}
DTYPES = [getattr(torch, name) for name in sorted(set(ITEM_BYTES) - QUANTIZED) if hasattr(torch, name)]
POOL_BYTES = 64 << 20

Stream: Any = torch.cuda.Stream
Event: Any = torch.cuda.Event
sleep: Any = torch.cuda._sleep  # takes clock cycles


@pytest.fixture(scope="module")
def pool() -> Tensor:
    """Random bytes to cut tensors from."""
    generator = torch.Generator(device="cuda").manual_seed(5)
    return torch.randint(0, 256, (POOL_BYTES,), dtype=torch.uint8, device="cuda", generator=generator)


@pytest.fixture
def digester() -> DeviceDigester:
    return DeviceDigester()


def check(value: Value, tensor: Tensor) -> None:
    """Against xxhash over the bytes of a host copy, made with torch alone."""
    plain = tensor.resolve_conj().resolve_neg()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(plain.element_size())
    words = plain.view(integer) if integer else plain
    held = words.cpu().contiguous()
    data, shape, item = bytes(host_bytes(held)), tuple(tensor.shape), tensor.element_size()
    described = f"{tensor.dtype} {shape} {tensor.stride()} at {tensor.data_ptr() & 63}"
    assert value.leaves == plain_digests(data, shape, item), described
    assert value.root.hex() == plain_root(dtype_name(tensor.dtype), data, shape, item), described
    assert (value.dtype, value.shape) == (dtype_name(tensor.dtype), shape)
    assert value.raw == (data if len(data) <= 4096 else None), described


def random_tensor(choose: random.Random, pool: Tensor) -> Tensor:
    """Any dtype, shape, stride, offset: cut from the pool, sliced, permuted, expanded."""
    dtype = choose.choice(DTYPES)
    row = choose.choice(
        [choose.randint(0, 40), choose.randint(1, 300), choose.randint(200, 3000), 2 ** choose.randint(0, 17)]
    )
    outer = [choose.randint(1, 7) for _ in range(choose.randint(0, 3))]
    if choose.random() < 0.05:
        row, outer = choose.randint(1, 40), [choose.randint(65_530, 70_000)]
    shape = [*outer, row] if choose.random() < 0.95 else []
    size = dtype.itemsize
    for length in shape:
        size *= length
    size = min(size, 32 << 20)
    start = choose.randint(0, (POOL_BYTES - size) // 64) * 64 + dtype.itemsize * choose.choice(
        [0, 0, 0, 1, 2, 3]
    )
    elements = size // dtype.itemsize
    flat = pool[start : start + elements * dtype.itemsize].view(dtype)
    rows = elements // row if row else 3
    tensor = flat[: rows * row].view(rows, row) if shape else flat.view(())
    if shape and len(outer) > 1 and row and rows == torch.Size(outer).numel():
        tensor = tensor.view(*outer, row)
    for dim in range(tensor.dim()):
        if choose.random() < 0.3:
            index = slice(choose.randint(0, 2), None, choose.choice([1, 1, 2, 3]))
            tensor = tensor[(slice(None),) * dim + (index,)]
    if choose.random() < 0.3:
        order = list(range(tensor.dim()))
        choose.shuffle(order)
        tensor = tensor.permute(order)
    if choose.random() < 0.1:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return (
        tensor.conj()
        if tensor.is_complex() and choose.random() < 0.5 and dtype is not torch.complex32
        else tensor
    )


@pytest.mark.parametrize("seed", range(12))
def test_bit_identical_with_xxhash(digester: DeviceDigester, pool: Tensor, seed: int) -> None:
    """12 times 450 tensors."""
    choose = random.Random(seed)
    for _ in range(10):
        tensors = [random_tensor(choose, pool) for _ in range(45)]
        pendings = [digester.submit(tensor) for tensor in tensors[:20]] + digester.submit_all(tensors[20:])
        digester.finish()
        for tensor, pending in zip(tensors, pendings, strict=True):
            check(pending.value, tensor)


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 8])
def test_every_length(digester: DeviceDigester, pool: Tensor, shift: int) -> None:
    lengths = [
        *range(1, 1100, 3 if shift else 1),
        *(n + d for n in (2048, 4096, 16384, 65536, 131072) for d in (-1, 0, 1)),
    ]
    tensors = [pool[shift : shift + 5000 // n * n + 3 * n].view(-1, n) for n in lengths]
    pendings = digester.submit_all(tensors)
    digester.finish()
    for tensor, pending in zip(tensors, pendings, strict=True):
        check(pending.value, tensor)


@pytest.mark.parametrize(
    ("rows", "row"), [(2000, 8192), (2000, 16384), (1500, 5000), (1024, 4097), (3, 1_000_001)]
)
def test_many_long_leaves(digester: DeviceDigester, pool: Tensor, rows: int, row: int) -> None:
    tensor = pool[: rows * row].view(rows, row)
    pending = digester.submit(tensor)
    digester.finish()
    check(pending.value, tensor)


def test_the_host_digest_is_the_same(digester: DeviceDigester, pool: Tensor) -> None:
    tensor = pool[:9000].view(torch.bfloat16).view(3, 1500)
    pending = digester.submit(tensor)
    digester.finish()
    assert pending.value == digest(tensor.cpu()) == digest(tensor)
    assert pending.value.leaves == digest(tensor.cpu()).leaves


def test_host_values_and_host_tensors(digester: DeviceDigester) -> None:
    on_device, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    pendings = [*digester.submit_all([on_device, on_host]), digester.submit_scalar(3)]
    assert digester.submit_all([]) == []
    assert pendings[1].value == digest(on_host)
    with pytest.raises(RuntimeError, match="call finish"):
        _ = pendings[0].value
    digester.finish()
    assert pendings[0].value == pendings[1].value
    assert pendings[2].value == HostDigester().submit_scalar(3).value


def test_a_digest_is_of_the_moment(digester: DeviceDigester) -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    pendings = []
    for number in range(20):
        tensor.fill_(number)
        pendings.append(digester.submit(tensor))
    digester.finish()
    expected = [digest(torch.full((1 << 20,), float(number))) for number in range(20)]
    assert [pending.value for pending in pendings] == expected


def test_nothing_waits_for_the_device(digester: DeviceDigester, pool: Tensor) -> None:
    tensors = [pool[: 64 << 10], pool[:100], pool[: 1 << 20].view(1024, 1024).t()]
    digester.submit_all(tensors)
    digester.finish()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sleep(400_000_000)  # about 0.2 s
        done = Event()
        pendings = [digester.submit(tensor) for tensor in tensors for _ in range(50)]
        done.record()
        assert not done.query(), "submitting waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    digester.finish()
    assert pendings[0].value == digest(tensors[0].cpu())


def reuse_before_digest(digester: DeviceDigester) -> tuple[Value, Value]:
    """Digest a side stream's tensor on the main stream, which is late, and have its memory reused."""
    side, main = Stream(), torch.cuda.current_stream()
    size = 32 << 20
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensor = torch.full((size,), 1, dtype=torch.uint8, device="cuda")
    main.wait_stream(side)
    sleep(200_000_000)
    pending = digester.submit(tensor)
    address = tensor.data_ptr()
    del tensor
    with torch.cuda.stream(side):
        others = [torch.full((size,), 2, dtype=torch.uint8, device="cuda") for _ in range(3)]
    reused = any(other.data_ptr() == address for other in others)
    digester.finish()
    return pending.value, digest(torch.full((size,), 2 if reused else 1, dtype=torch.uint8))


def test_freed_memory_is_not_reused_before_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.empty_cache()
    ones = digest(torch.full((32 << 20,), 1, dtype=torch.uint8))
    with monkeypatch.context() as without:
        without.setattr(queues.DeviceQueue, "keep", lambda *_: None)
        value, _ = reuse_before_digest(DeviceDigester())
        if value == ones:
            pytest.skip("the allocator did not reuse the memory even without protection")
    torch.cuda.empty_cache()
    value, _ = reuse_before_digest(DeviceDigester())
    assert value == ones


def test_streams_and_threads(pool: Tensor) -> None:
    digester = DeviceDigester(segment_bytes=1 << 20)
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        with torch.cuda.stream(Stream()):
            tensors = []
            for i in range(40):
                sleep(10_000)
                tensors.append(pool[i * 1000 : i * 1000 + 50_000] + number)
                tensors[-1].add_(1)
                found.setdefault(number, []).append((digester.submit(tensors[-1]), tensors[-1]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    digester.finish()
    assert sum(map(len, found.values())) == 160
    for pairs in found.values():
        for pending, tensor in pairs:
            assert pending.value == digest(tensor.cpu())


def test_a_full_ring_is_flushed_and_told(pool: Tensor) -> None:
    digester = DeviceDigester(segment_bytes=64 << 10, limit_bytes=256 << 10)
    assert not digester.notes
    tensor = pool[: 4096 * 5000].view(5000, 4096)
    pendings = []
    for start in range(60):
        pendings.append(digester.submit(tensor[start * 50 : start * 50 + 2000]))
    digester.finish()
    for start, pending in enumerate(pendings):
        if start % 7 == 0:
            check(pending.value, tensor[start * 50 : start * 50 + 2000])
    (note,) = digester.notes
    assert "ran full" in note
    assert digester.memory["device_bytes"] <= (256 << 10) + (64 << 10)
    with pytest.raises(NotObservable, match="do not fit into the ring"):
        digester.submit(pool.view(-1, 256)[:100_000])
    batch = digester.submit_all([tensor[:5000]] * 8)
    digester.finish()
    assert len({pending.value.root for pending in batch}) == 1
    check(batch[0].value, tensor[:5000])


def test_a_thousand_runs_leave_memory_flat(pool: Tensor) -> None:
    digester = DeviceDigester()
    tensors = [pool[: 8 << 20].view(2048, 4096), pool[:1000], pool[: 1 << 20].view(1024, 1024).t()]

    def run() -> None:
        pendings = digester.submit_all(tensors)
        digester.finish()
        assert pendings[0].value.dtype == "uint8"

    for _ in range(10):
        run()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), digester.memory
    for _ in range(1000):
        run()
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), digester.memory) == before


def test_graph_replays(digester: DeviceDigester, pool: Tensor) -> None:
    static = pool[: 1 << 20].clone().view(256, 4096)
    small = torch.zeros(10, device="cuda")
    side = Stream()
    with torch.cuda.stream(side):
        digester.submit_all([static + 1, small])
    digester.finish()
    graph = torch.cuda.CUDAGraph()
    allocated = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        first = static + 1
        captured = [digester.submit(first), *digester.submit_all([small, static.t()])]
        small += 1
        captured.append(digester.submit(small))
    slots = digester.take_capture()
    assert slots is not None
    assert len(slots) == 4
    assert digester.take_capture() is None
    assert [pending.index for pending in captured if isinstance(pending, CapturedPending)] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="each replay has a value of its own"):
        _ = captured[0].value
    results, expected = [], []
    for number in range(5):
        static.fill_(number)
        before = small.clone()
        graph.replay()
        results.append(slots.replayed())
        expected.append(
            [first.clone(), before, static.t().clone(memory_format=torch.preserve_format), small.clone()]
        )
    eager = digester.submit(static)
    digester.finish()
    for pendings, tensors in zip(results, expected, strict=True):
        assert all(isinstance(pending, DevicePending) for pending in pendings)
        for pending, tensor in zip(pendings, tensors, strict=True):
            check(pending.value, tensor)
    check(eager.value, static)
    assert torch.cuda.memory_allocated() - allocated < 16 << 20


def test_a_graph_with_more_digests_than_the_reserve(pool: Tensor) -> None:
    digester = DeviceDigester(segment_bytes=64 << 10)
    tensors = [pool[i : i + 2_000_000 // 4096 * 4096].view(-1, 4096) for i in range(0, 320, 16)]
    torch.cuda.synchronize()
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for tensor in tensors:
                digester.submit(tensor)
            torch.zeros(1, device="cuda")  # a kernel, after which nothing is taken for known
            digester.submit_all(tensors)
        slots = digester.take_capture()
        assert slots is not None
        graphs.append((graph, slots))
    pendings = []
    for graph, slots in graphs * 2:
        graph.replay()
        pendings.append(slots.replayed())
    digester.finish()
    for replayed in pendings:
        assert len(replayed) == 40
        for pending, tensor in zip(replayed, tensors * 2, strict=True):
            assert pending.value == digest(tensor)


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen")


class FunctionLog(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen")


@pytest.fixture
def meta_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_modes_and_defaults_do_not_matter(meta_default: None, pool: Tensor) -> None:
    tensors = [
        pool[:5000],
        pool[:10],
        pool[:6400].view(80, 80).t(),
        torch.ones(5000, device="cuda").to(torch.complex64).conj(),
    ]
    with FunctionLog(), Log():  # type: ignore[no-untyped-call]
        digester = make_digester("cuda")
        pendings = digester.submit_all(tensors)
        pendings.append(digester.submit(tensors[2]))
        digester.finish()
    for pending, tensor in zip(pendings, [*tensors, tensors[2]], strict=True):
        check(pending.value, tensor)


def test_inside_function_transforms(digester: DeviceDigester) -> None:
    plain, seen = torch.ones(3000, 2, device="cuda").t(), []

    def function(x: Tensor) -> Tensor:
        seen.append(digester.submit(plain))
        return x.sum()

    torch.func.vmap(function)(torch.ones(3, 2, device="cuda"))
    torch.func.grad(function)(torch.ones(3, device="cuda"))
    digester.finish()
    assert [pending.value for pending in seen] == [digest(plain)] * 2


def test_version_counters_and_gradients_are_left_alone(digester: DeviceDigester) -> None:
    tensor = torch.ones(3000, 2, device="cuda", requires_grad=True) * 2
    version = tensor._version
    digester.submit_all([tensor, tensor.t()])
    digester.finish()
    assert (tensor._version, tensor.requires_grad, torch.is_grad_enabled()) == (version, True, True)


def test_make_digester() -> None:
    assert isinstance(make_digester("cuda"), DeviceDigester)
    assert isinstance(make_digester(torch.device("cuda", 0)), DeviceDigester)


def test_falls_back_to_the_host_with_a_note(monkeypatch: pytest.MonkeyPatch, pool: Tensor) -> None:
    def unavailable(*_: object) -> bytes:
        raise driver.DeviceUnavailable("NVRTC is gone")

    monkeypatch.setattr(queues, "cubin", unavailable)
    digester = make_digester("cuda")
    assert isinstance(digester, HostDigester)
    assert "NVRTC is gone" in digester.notes[0]
    check(digester.submit(pool[:5000]).value, pool[:5000])


def test_the_cache_of_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    DeviceDigester()
    (cached,) = (tmp_path / "detaudit").iterdir()
    monkeypatch.setattr(driver, "_compile", lambda *_: pytest.fail("compiled again"))
    DeviceDigester()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(driver, "_compile", lambda *_: cached.read_bytes())
    DeviceDigester()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices(digester: DeviceDigester, pool: Tensor) -> None:
    tensors = [pool[:9000], pool[:9000].to("cuda:1"), pool[:10].to("cuda:1")]
    pendings = digester.submit_all(tensors)
    assert torch.cuda.current_device() == 0
    digester.finish()
    for pending, tensor in zip(pendings, tensors, strict=True):
        check(pending.value, tensor)
