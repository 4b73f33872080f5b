"""A digester for a target of which nobody knows yet what it computes on: a script."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from detaudit.core.digest import Digester, HostDigester, Pending, make_digester


class UndecidedDigester:
    """Digests on the host until the first CUDA tensor comes, and as ``make_digester`` decides from then on.

    CUDA is not touched before the target has touched it: a script may still choose its devices
    (``CUDA_VISIBLE_DEVICES``), and there may be none.
    """

    def __init__(self) -> None:
        self._digester: Digester = HostDigester()
        self._decided = False

    def submit(self, tensor: Tensor) -> Pending:
        return self._for((tensor,)).submit(tensor)

    def submit_all(self, tensors: Sequence[Tensor]) -> list[Pending]:
        return self._for(tensors).submit_all(tensors)

    def submit_scalar(self, scalar: object) -> Pending:
        return self._digester.submit_scalar(scalar)

    def finish(self) -> None:
        self._digester.finish()

    @property
    def notes(self) -> tuple[str, ...]:
        return self._digester.notes

    def _for(self, tensors: Sequence[Tensor]) -> Digester:
        if not self._decided:
            device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
            if device is not None:
                self._digester, self._decided = make_digester(device), True
        return self._digester
