"""The script: the parts for one kind of call, and the code of ours it calls, in one file."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from detaudit import __version__
from detaudit.core.errors import Unsupported
from detaudit.repro.excerpt import Excerpt, Import, excerpt

OPERATORS = "torch.ops:"
"""Entry of a case that holds one call of a torch operator."""

_PARTS = "detaudit.repro.parts"
_STAND_INS: Mapping[str, str] = {
    "detaudit.core.errors:UsageError": f"{_PARTS}.errors:UsageError",
    "detaudit.core.errors:Unsupported": f"{_PARTS}.errors:Unsupported",
    "detaudit.kernels.cases:Case": f"{_PARTS}.case:Case",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a case can become.

    Args:
        subject: class of the script, in its module under ``parts``.
        switch: the option of the script that asks for the stable setting.
        avoid: how a user sets it.
        packages: what the script needs.
    """

    subject: str
    switch: str
    avoid: str
    packages: tuple[str, ...] = ("torch", "safetensors")


REFERENCE = Kind("reference:ReferenceMoe", "--ordered", 'finalize="ordered"')
FLASHINFER = Kind(
    "flashinfer:FlashInferMoe",
    "--unfused",
    "cutlass_fused_moe(..., use_fused_finalize=False)",
    ("torch", "safetensors", "flashinfer-python"),
)
OPERATOR = Kind("operator:Operator", "--deterministic", "torch.use_deterministic_algorithms(True)")

_ENTRIES: Mapping[str, Kind] = {
    "detaudit.kernels.reference:reference_moe": REFERENCE,
    "flashinfer.fused_moe:cutlass_fused_moe": FLASHINFER,
    "flashinfer.fused_moe.core:cutlass_fused_moe": FLASHINFER,
}


def kind_of(entry: str) -> Kind:
    """Raises Unsupported for an entry point that no script can call."""
    kind = OPERATOR if entry.startswith(OPERATORS) else _ENTRIES.get(entry)
    if kind is None:
        raise Unsupported(
            f"no repro script can be made for {entry}; its case can be rerun with 'detaudit kernels'"
        )
    return kind


def build_script(kind: Kind, title: str, *, threads: int, runs: int) -> str:
    """The text of ``repro.py``.

    Args:
        title: one line on what it shows.
        threads: CPU threads the call was captured with.
        runs: how many runs it compares by default.
    """
    module, _, subject = kind.subject.partition(":")
    code = excerpt([f"{_PARTS}.main:main", f"{_PARTS}.{module}:{subject}"], _STAND_INS)
    return _TEMPLATE.format(
        title=title,
        version=__version__,
        switch=kind.switch,
        avoid=kind.avoid,
        needs=" and ".join(", ".join(kind.packages).rsplit(", ", 1)),
        packages=" ".join(kind.packages),
        imports=_statements(code.imports),
        body=_body(code),
        call=f"main({subject}, threads={threads}, runs={runs})",
    )


def _statements(imports: Sequence[Import]) -> str:
    """Standard library first; names from one module in one statement."""
    blocks: tuple[list[str], list[str]] = ([], [])
    for (module, named), group in groupby(imports, key=lambda found: (found.module, found.name is not None)):
        block = blocks[module.partition(".")[0] not in sys.stdlib_module_names]
        if named:
            block.append(f"from {module} import " + ", ".join(f"{item.name}{item.alias}" for item in group))
        else:
            block += [f"import {module}{item.alias}" for item in group if module != "sys"]
    return "\n\n".join(
        "\n".join(sorted(block, key=lambda line: (line.startswith("from"), line))) for block in blocks
    )


def _body(code: Excerpt) -> str:
    return "\n\n\n".join(f"# ---- {name.rpartition('.')[2]} ----\n\n\n{text}" for name, text in code.sections)


_TEMPLATE = '''\
"""{title}

    python repro.py
    python repro.py {switch}    # {avoid}

Needs {needs}, and the two files beside it. Exit codes: 0 all runs gave the same bits, 1 they differ,
2 it could not be run, 3 the positive control could not run or did not differ, so nothing was shown.
Written by detaudit {version}, which is not needed to run it.
"""

from __future__ import annotations

import os
import sys
import traceback


def _ended(kind, error, trace):
    # Python ends with 1 after any exception, which would read as "differs".
    missing = isinstance(error, ImportError)
    if missing:
        print(f"repro.py: {{error}}; pip install {packages}", file=sys.stderr)
    elif not isinstance(error, (KeyboardInterrupt, BrokenPipeError)):
        traceback.print_exception(kind, error, trace)
    codes = {{KeyboardInterrupt: 130, BrokenPipeError: 141}}
    os._exit(2 if missing else codes.get(kind, 70))


if __name__ == "__main__":
    sys.excepthook = _ended

{imports}

{body}


if __name__ == "__main__":
    sys.exit({call})
'''
