"""From cases to kernel reports: pick the backend, run the variants, decide, recommend."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence

from detaudit.core.errors import DetauditError, UsageError
from detaudit.core.records import KernelReport, VariantResult
from detaudit.kernels.backend import Backend, Options, Role, Unavailable, Variant
from detaudit.kernels.cases import Case
from detaudit.kernels.outcomes import decide
from detaudit.kernels.recommend import recommend
from detaudit.kernels.runner import RUNS, Progress, run_variants

BACKENDS: Mapping[str, tuple[str, str]] = {
    "flashinfer-cutlass": ("detaudit.kernels.flashinfer_cutlass", "FlashInferCutlass"),
    "reference": ("detaudit.kernels.reference_backend", "ReferenceBackend"),
}


def all_backends() -> tuple[Backend, ...]:
    """All backends of this installation. None imports its library before it is asked for a case."""
    return tuple(_load(name) for name, (module, _) in BACKENDS.items() if importlib.util.find_spec(module))


def backend_named(name: str) -> Backend:
    """Raises UsageError for a backend that this installation does not have."""
    if name not in BACKENDS or importlib.util.find_spec(BACKENDS[name][0]) is None:
        known = ", ".join(backend.name for backend in all_backends())
        raise UsageError(f"there is no kernel backend {name!r}; choose one of {known}")
    return _load(name)


def _load(name: str) -> Backend:
    module, attribute = BACKENDS[name]
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    return backend


def backend_for(case: Case, known: Sequence[Backend]) -> Backend | None:
    """The backend whose kernel the case was captured from."""
    return next((backend for backend in known if backend.accepts(case)), None)


def confirm(
    cases: Sequence[Case],
    *,
    runs: int = RUNS,
    backends: Sequence[Backend] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[KernelReport]:
    """Rerun each case under the variants of the backend it belongs to.

    A case that belongs to no backend, or whose backend cannot run it here, is ``unsupported``: it is never
    handed to another backend.

    Args:
        backends: those to choose from; all of them by default.
        progress: called with what is running, the runs done and the runs there will be, for each case anew.
    """
    known = all_backends() if backends is None else backends
    return [
        confirm_with(backend_for(case, known), case, runs=runs, options=options, progress=progress)
        for case in cases
    ]


def confirm_with(
    backend: Backend | None,
    case: Case,
    *,
    runs: int = RUNS,
    options: Options | None = None,
    progress: Progress | None = None,
) -> KernelReport:
    """Rerun one case on one backend, which may have been asked for by name; ``None`` if none takes it."""
    if backend is None:
        hint = "; 'detaudit repro' repeats a captured operator" if case.entry.startswith("torch.ops:") else ""
        return _unsupported(case, "none", f"no backend of this detaudit runs {case.entry}{hint}")
    availability = backend.availability(case)
    if isinstance(availability, Unavailable):
        return _unsupported(case, backend.name, availability.sentence)
    try:
        here = case.to(availability.device)
        variants = backend.variants(here, options or Options())
        results = run_variants(backend, here, variants, runs=runs, progress=progress)
    except (DetauditError, RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        return _unsupported(case, backend.name, f"the case could not be set up: {text}")
    asked = next((i for i, variant in enumerate(variants) if variant.asked), None)
    decision = decide(
        controls=_with_role("control", variants, results),
        candidates=_with_role("candidate", variants, results),
        asked=None if asked is None else results[asked],
        cannot_differ=backend.cannot_differ(here),
    )
    return KernelReport(
        case=case.name,
        module=case.module,
        backend=backend.name,
        outcome=decision.outcome,
        outcome_reason=decision.reason,
        recommended=recommend(backend, here, variants, decision.stable),
        variants=results,
        control=decision.control,
        asked=None if asked is None else variants[asked].name,
    )


def _with_role(
    role: Role, variants: Sequence[Variant], results: Sequence[VariantResult]
) -> list[VariantResult]:
    return [result for variant, result in zip(variants, results, strict=True) if variant.role == role]


def _unsupported(case: Case, backend: str, reason: str) -> KernelReport:
    return unsupported_report(case.name, case.module, backend, reason)


def unsupported_report(case: str, module: str | None, backend: str, reason: str) -> KernelReport:
    """The report on a case, or on a synthetic case that was not built, that cannot run here."""
    decision = decide(controls=(), candidates=(), unavailable=reason)
    return KernelReport(case, module, backend, decision.outcome, decision.reason, recommended=None)
