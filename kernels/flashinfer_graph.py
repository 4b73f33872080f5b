"""CUDA graphs of single calls: to replay them, and to read the names of the kernels they launch.

The names prove what ran. The unfused finalize is a kernel of its own, ``finalizeMoeRoutingKernel``; where a
mixture of experts runs without it, GEMM2 has finalized in its epilogue.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

UNFUSED_KERNEL = "finalizeMoeRoutingKernel"
_GEMM = "cutlass"
"""In the name of every GEMM kernel of CUTLASS; names without it are not those of a mixture of experts."""

Work = Callable[[], Tensor]


class Replay:
    """A call captured once; each ``__call__`` replays it on the current stream, into the same output."""

    def __init__(self, work: Work) -> None:
        work()
        self._graph, self._output = capture(work)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output


def capture(work: Work, *, keep: bool = False) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Not through ``torch.cuda.graph``: that collects garbage and empties caches, each time.

    Args:
        work: has run before, so that nothing is loaded or allocated for the first time.
        keep: whether the graph's nodes stay readable; it is then not ready to be replayed.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            output = work()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, output


def takes_fused(work: Work) -> bool | None:
    """Whether a mixture of experts finalizes inside GEMM2, by the kernels it launches; ``None`` if these
    cannot be named. ``work`` has run before; it is captured here, not run."""
    names = kernel_names(work)
    if not any(_GEMM in name for name in names):
        return None
    return not any(UNFUSED_KERNEL in name for name in names)


def kernel_names(work: Work) -> list[str]:
    """Mangled names of the kernels that a call launches, in no particular order; empty if they are not to be
    had, as with drivers older than CUDA 12.3."""
    try:
        graph, _ = capture(work, keep=True)
        return _names_in(graph.raw_cuda_graph())
    except (RuntimeError, OSError, AttributeError):
        return []


class _KernelNode(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid_block_shared", ctypes.c_uint * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


_KERNEL_NODE = 0
"""``CU_GRAPH_NODE_TYPE_KERNEL``."""


def _names_in(graph: int) -> list[str]:
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    _check(cuda.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(cuda.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)))
    return [name for node in nodes if (name := _name_of(cuda, ctypes.c_void_p(node))) is not None]


def _name_of(cuda: ctypes.CDLL, node: ctypes.c_void_p) -> str | None:
    """``None`` for a node that is no kernel."""
    kind = ctypes.c_int()
    _check(cuda.cuGraphNodeGetType(node, ctypes.byref(kind)))
    if kind.value != _KERNEL_NODE:
        return None
    found, name = _KernelNode(), ctypes.c_char_p()
    _check(cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(found)))
    if found.function:
        _check(cuda.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(found.function)))
    else:
        _check(cuda.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(found.kernel)))
    return (name.value or b"").decode(errors="replace")


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver answers with error {result}")
