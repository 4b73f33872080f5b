"""Why an operator can give different bits for equal inputs, in one line each.

Sources: torch's documentation of ``torch.use_deterministic_algorithms`` (which operators have no
deterministic implementation by default) and the kernels themselves.
"""

from __future__ import annotations

_UNORDERED = "adds from several threads at once, in the order in which they arrive"
_LAST_WINS = "several indices may name one element, and the thread that writes last wins"

_MECHANISMS = {
    "index_put": _UNORDERED,
    "_index_put_impl": _UNORDERED,
    "put": _LAST_WINS,
    "index_add": _UNORDERED,
    "index_reduce": _UNORDERED,
    "scatter_add": _UNORDERED,
    "scatter_reduce": _UNORDERED,
    "scatter": _LAST_WINS,
    "index_copy": _LAST_WINS,
    "masked_scatter": _LAST_WINS,
    "bincount": _UNORDERED,
    "histc": _UNORDERED,
    "cumsum": "the parallel scan on CUDA combines blocks in no fixed order",
    "embedding_dense_backward": _UNORDERED,
    "_embedding_bag_dense_backward": _UNORDERED,
    "grid_sampler_2d_backward": _UNORDERED,
    "grid_sampler_3d_backward": _UNORDERED,
    "upsample_bilinear2d_backward": _UNORDERED,
    "upsample_bicubic2d_backward": _UNORDERED,
    "convolution_backward": "cuDNN may choose an algorithm that adds with atomics",
    "kthvalue": "of equal elements it may return any one's index",
    "median": "of equal elements it may return any one's index",
    "nll_loss2d_forward": _UNORDERED,
    "_scaled_dot_product_flash_attention_backward": _UNORDERED,
    "_scaled_dot_product_efficient_attention_backward": _UNORDERED,
}


def mechanism(operator: str) -> str | None:
    """One line on how ``aten.index_put_.default`` and the like can differ; ``None`` where it is not known."""
    namespace, _, rest = operator.partition(".")
    name = rest.partition(".")[0]
    known = _MECHANISMS.get(name) or _MECHANISMS.get(name.removesuffix("_"))
    return known if namespace == "aten" else None
