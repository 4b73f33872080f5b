"""The few calls of CUDA's driver API and of NVRTC that the digest needs, through ctypes.

torch ships NVRTC and has loaded the driver, so nothing is built at install and no toolkit is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_INVALID_CONTEXT = 201
_LAUNCH_CONFIG = struct.Struct("<7I4x2QI4x")
"""CUlaunchConfig: grid and block dimensions, shared memory; stream; attributes and their number."""
_GRID = struct.Struct("<I")
_STREAM = struct.Struct("<Q")
_STREAM_OFFSET = 32


class DeviceUnavailable(RuntimeError):
    """The device digest cannot run here; the message says why. Callers fall back to the host."""


@functools.cache
def _libcuda() -> ctypes.CDLL:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceUnavailable(f"the CUDA driver cannot be loaded ({error})") from error
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    cuda.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, pointer]
    cuda.cuStreamGetCaptureInfo_v2.argtypes = [pointer, *[pointer] * 5]
    cuda.cuGraphGetNodes.argtypes = [pointer, pointer, pointer]
    cuda.cuEventRecord.argtypes = [pointer, pointer]
    cuda.cuStreamWaitEvent.argtypes = [pointer, pointer, number]
    return cuda


def _checked(result: int, call: str) -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    _libcuda().cuGetErrorString(result, ctypes.byref(text))
    raise DeviceUnavailable(f"{call} failed: {(text.value or b'unknown error').decode()} ({result})")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    packages = Path(torch.__file__).parents[1] / "nvidia"
    for candidate in (name, *map(str, packages.glob(f"*/lib/{name}"))):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise DeviceUnavailable(f"{name}, which comes with torch's CUDA packages, cannot be loaded")


def _compile(source: bytes, options: Sequence[bytes]) -> bytes:
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"xxh3.cu", 0, None, None):
        raise DeviceUnavailable("NVRTC cannot create a program")
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if result:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise DeviceUnavailable(f"NVRTC cannot compile the digest: {log.decode(errors='replace')[:400]}")
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(
    get_size: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, program: ctypes.c_void_p
) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def cubin(source: bytes, architecture: str, defines: Sequence[str] = ()) -> bytes:
    """Machine code for an architecture such as ``sm_90``, from the user's cache if it was compiled before.

    Raises:
        DeviceUnavailable: NVRTC is missing, too old for the architecture, or refuses the source.
    """
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{define}" for define in defines)]
    key = hashlib.sha256(source + repr((options, torch.version.cuda)).encode()).hexdigest()[:32]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "detaudit" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = _compile(source, [option.encode() for option in options])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass  # A cache that cannot be written costs a second, not the audit.
    return code


class Kernel:
    """A kernel loaded on one device. Its one parameter is passed by value: what ``parameters`` holds."""

    def __init__(self, code: bytes, name: str, device: int, parameter_bytes: int, threads: int) -> None:
        self._cuda = _libcuda()
        self._device = device
        self._threads = threads
        buffer = ctypes.create_string_buffer(parameter_bytes)
        self.parameters = memoryview(buffer).cast("B")
        self._config = ctypes.create_string_buffer(_LAUNCH_CONFIG.size)
        self._stream = 0
        _LAUNCH_CONFIG.pack_into(self._config, 0, 0, 1, 1, threads, 1, 1, 0, 0, 0, 0)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._enter_context()
        _checked(self._cuda.cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
        result = self._cuda.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode())
        _checked(result, "cuModuleGetFunction")
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self._arguments = ctypes.byref(self._config), self._function, pointers, None
        self._launch = self._cuda.cuLaunchKernelEx

    def _enter_context(self) -> None:
        """Make the device's primary context, which torch uses, current in this thread."""
        context = ctypes.c_void_p()
        _checked(
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device),
            "cuDevicePrimaryCtxRetain",
        )
        _checked(self._cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def blocks_per_multiprocessor(self) -> int:
        blocks = ctypes.c_int()
        result = self._cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks), self._function, self._threads, ctypes.c_size_t(0)
        )
        _checked(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return max(blocks.value, 1)

    def launch(self, blocks: int, stream: int) -> None:
        """Queue the kernel on a raw stream, with what ``parameters`` holds now."""
        _GRID.pack_into(self._config, 0, blocks)
        if stream != self._stream:
            _STREAM.pack_into(self._config, _STREAM_OFFSET, stream)
            self._stream = stream
        result = self._launch(*self._arguments)
        if result == _INVALID_CONTEXT:  # a thread that has not used CUDA yet
            self._enter_context()
            result = self._launch(*self._arguments)
        if result:
            _checked(result, "cuLaunchKernelEx")


def copy_on_device(destination: int, source: int, size: int, stream: int) -> None:
    """Queue a copy between device addresses on a raw stream."""
    _checked(_libcuda().cuMemcpyDtoDAsync_v2(destination, source, size, stream), "cuMemcpyDtoDAsync")


def capture_position(stream: int) -> tuple[int | None, int]:
    """The graph that is being captured on a raw stream, and how many nodes it has so far, on all streams."""
    status, graph, nodes = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    result = _libcuda().cuStreamGetCaptureInfo_v2(
        stream, ctypes.byref(status), None, ctypes.byref(graph), None, None
    )
    _checked(result, "cuStreamGetCaptureInfo")
    _checked(_libcuda().cuGraphGetNodes(graph, None, ctypes.byref(nodes)), "cuGraphGetNodes")
    return graph.value, nodes.value


class StreamEvent:
    """Marks how far a stream has come, so that another can wait for it even if the stream is gone by then."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        _checked(_libcuda().cuEventCreate(ctypes.byref(self._event), 2), "cuEventCreate")  # no timing

    def record(self, stream: int) -> None:
        _checked(_libcuda().cuEventRecord(self._event, stream), "cuEventRecord")

    def block(self, stream: int) -> None:
        """Work queued on ``stream`` from now on waits for what was recorded."""
        _checked(_libcuda().cuStreamWaitEvent(stream, self._event, 0), "cuStreamWaitEvent")
