"""CUDA graphs of single calls: to replay them, and to read the names of the kernels they launch.

The names prove what ran. The unfused finalize is a kernel of its own, ``finalizeMoeRoutingKernel``; where a
mixture of experts runs without it, GEMM2 has finalized in its epilogue.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

UNFUSED_KERNEL = "finalizeMoeRoutingKernel"
_GEMM = "cutlass"
"""In the name of every GEMM kernel of CUTLASS; a listing without it cannot be read."""

Work = Callable[[], Tensor]


class Replay:
    """A call captured once; each ``__call__`` replays it on the current stream, into the same output."""

    def __init__(self, work: Work) -> None:
        work()
        self._graph, self._output = capture(work)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output


def capture(work: Work, *, listed: bool = False) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Not through ``torch.cuda.graph``: that collects garbage and empties caches, each time.

    Args:
        work: has run before, so that nothing is loaded or allocated for the first time.
        listed: whether the graph's nodes stay readable.
    """
    graph = torch.cuda.CUDAGraph()
    if listed:
        graph.enable_debug_mode()
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
    cannot be listed. It has run before; it is captured, not run."""
    listing = kernel_listing(work)
    if listing is None or _GEMM not in listing.lower():
        return None
    return UNFUSED_KERNEL not in listing


def kernel_listing(work: Work) -> str | None:
    """The graph of a call as the CUDA runtime prints it, with the kernels' (mangled) names."""
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="detaudit-") as folder:
            warnings.simplefilter("ignore")  # debug_dump announces itself as one
            graph, _ = capture(work, listed=True)
            path = Path(folder, "graph.dot")
            graph.debug_dump(str(path))
            return path.read_text(encoding="utf-8", errors="replace")
    except (RuntimeError, OSError):
        return None
