"""Names of kernels: demangled by the C++ runtime, and shortened to what tells kernels apart."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Final, Literal

_MOST_SHORT: Final = 100
_ANONYMOUS: Final = "(anonymous namespace)"
_FUSION: Final = re.compile(r"\bfusion::(\w+)<")
_FINALIZE: Final = re.compile(
    r"(?<![A-Za-z_])ScaledAccPer(?:Row|Col)BiasPer(?:Row|Col)ScaleScatter\b|"
    r"\d\dScaledAccPer(?:Row|Col)BiasPer(?:Row|Col)ScaleScatterI"
)
"""Epilogues of a CUTLASS grouped GEMM that add every row, scaled, to where its token is in the output."""
_TILE: Final = re.compile(r"(?:cute::)?C<(\d+)>")
_NUMBER: Final = re.compile(r"^(?:\([^()]*\))?-?\d+u?l*$|^true$|^false$")


def demangle(symbols: Iterable[str]) -> dict[str, str]:
    """The C++ name of each symbol; the symbol itself where it has none, or nothing here can tell.

    The C++ runtime gives up on symbols of more than 1,024 characters, which CUTLASS has many of; those are
    left to a program: CUDA's cu++filt, LLVM's, or binutils' with its own limit off.
    """
    mangled = [symbol for symbol in dict.fromkeys(symbols) if symbol.startswith("_Z")]
    demangler = _demangler()
    names = {symbol: name for symbol in mangled if demangler and (name := demangler(symbol))}
    names |= _by_program([symbol for symbol in mangled if symbol not in names])
    return {symbol: names.get(symbol, symbol) for symbol in symbols}


def _by_program(symbols: Sequence[str]) -> dict[str, str]:
    for program, *options in (("cu++filt",), ("llvm-cxxfilt",), ("c++filt", "-r")):
        path = shutil.which(program) if symbols else None
        if path is None:
            continue
        text = "\n".join(symbols) + "\n"
        try:
            done = subprocess.run([path, *options], input=text, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        names = done.stdout.splitlines()
        if done.returncode == 0 and len(names) == len(symbols):
            return dict(zip(symbols, names, strict=True))
    return {}


@cache
def _demangler() -> Callable[[str], str | None] | None:
    """``__cxa_demangle`` of the Itanium C++ ABI."""
    for name in ("libstdc++.so.6", "libc++abi.so.1", ctypes.util.find_library("stdc++")):
        try:
            function = ctypes.CDLL(name or "").__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        return partial(_demangled_by, function)
    return None


def _demangled_by(function: Any, symbol: str) -> str | None:
    text = function(symbol.encode("utf-8", "replace"), None, None, None)
    if not text:
        return None
    name = ctypes.string_at(text).decode("utf-8", "replace")
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(text)
    return name


def finalize_of(symbol: str) -> Literal["FINALIZE", "NONE"] | None:
    """Whether a CUTLASS GEMM reduces its output over experts in its epilogue, by atomics.

    Read from the symbol (mangled or not), so that it does not depend on a demangler. None: not such a GEMM.
    """
    if "GemmUniversal" not in symbol or "FusionCallbacks" not in symbol:
        return None
    return "FINALIZE" if _FINALIZE.search(symbol) else "NONE"


def shorten(name: str) -> str:
    """A demangled name without return type and parameters, and with at most a few template arguments.

    >>> shorten("void ns::sum<4, ns::Add<float>>(float*, float const*)")
    'ns::sum<4, Add>'
    """
    if name.startswith("_Z"):
        return _clipped(_outermost(name))
    text = name.replace(_ANONYMOUS, "{anonymous}")
    text = text[: _top_level(text, "(")]
    text = text[_last_space(text) + 1 :]
    cut = _top_level(text, "<")
    base, arguments = text[:cut], split_arguments(text[cut:])
    if "GemmUniversal" in text and (gemm := _gemm(text)):
        told = gemm
    else:
        told = [short for argument in arguments if (short := _short_argument(argument))]
    short = f"{base}<{', '.join(told)}>" if told else base
    return _clipped(short.replace("{anonymous}::", ""))


def identifier(name: str) -> str:
    """The function's own name, which its symbol holds whether mangled or not.

    >>> identifier("void ns::sum<4, ns::Add<float>>(float*, float const*)")
    'sum'
    """
    if name.startswith("_Z"):
        return _outermost(name).rpartition("::")[2]
    base = shorten(name).partition("<")[0]
    return base.rpartition("::")[2]


def _clipped(short: str) -> str:
    return short if len(short) <= _MOST_SHORT else short[: _MOST_SHORT - 3].rstrip(", ") + "..."


def _outermost(symbol: str) -> str:
    """``ns::kernel`` of a symbol that nothing could demangle; the symbol itself if it begins otherwise."""
    parts: list[str] = []
    at = 3 if symbol.startswith("_ZN") else 2
    while (match := re.compile(r"\d+").match(symbol, at)) is not None:
        at = match.end() + int(match[0])
        parts.append(symbol[match.end() : at])
    return "::".join(parts) or symbol


def split_arguments(text: str) -> list[str]:
    """Top-level parts of a leading ``<...>``; none if there is no such list."""
    if not text.startswith("<"):
        return []
    parts, depth, start = [], 0, 1
    for index, char in enumerate(text):
        if char in "<({[":
            depth += 1
        elif char in ">)}]" and text[index - 1] != "-":
            depth -= 1
        if (char == "," and depth == 1) or depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
        if depth == 0:
            break
    return [part for part in parts if part]


def _gemm(text: str) -> list[str]:
    """Of a CUTLASS 3 GEMM: its tile and what its epilogue computes."""
    told = ["GemmUniversal"]
    collective = text.find("CollectiveMma<")
    if collective >= 0:
        arguments = split_arguments(text[collective + len("CollectiveMma") :])
        tile = _TILE.findall(arguments[1]) if len(arguments) > 1 else []
        told += ["x".join(tile)] if tile else []
    fusions = [found for found in _FUSION.findall(text) if not found.startswith(("FusionCallbacks", "Sm"))]
    return told + fusions[:1]


def _short_argument(argument: str) -> str:
    if _NUMBER.match(argument):
        return argument.rpartition(")")[2] or argument
    base = argument[: _top_level(argument, "<")]
    return base[: _top_level(base, "(")].rpartition("::")[2].strip()


def _top_level(text: str, wanted: str) -> int:
    """Index of the first ``wanted`` outside of all brackets, or the length."""
    depth = 0
    for index, char in enumerate(text):
        if char == wanted and depth == 0:
            return index
        if char in "<({[":
            depth += 1
        elif char in ">)}]" and text[index - 1 : index] != "-":
            depth -= 1
    return len(text)


def _last_space(text: str) -> int:
    depth, last = 0, -1
    for index, char in enumerate(text):
        if char in "<({[":
            depth += 1
        elif char in ">)}]":
            depth -= 1
        elif char == " " and depth == 0:
            last = index
    return last
