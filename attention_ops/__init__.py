"""Attention operators for PyTorch, written in C++ and CUDA."""

from ._library import build_info, isa, load

load()

from . import masks, nn, position, reference, rotary, visualize  # noqa: E402
from .functional import (  # noqa: E402
    COMPUTE_INTENSIVE_OPS,
    Summaries,
    attention,
    attention_summaries,
    attention_weights,
    dropout_mask,
)
from .rotary import rope  # noqa: E402
from .sdpa import scaled_dot_product_attention  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "COMPUTE_INTENSIVE_OPS",
    "Summaries",
    "attention",
    "attention_summaries",
    "attention_weights",
    "build_info",
    "dropout_mask",
    "isa",
    "masks",
    "nn",
    "position",
    "reference",
    "rope",
    "rotary",
    "scaled_dot_product_attention",
    "visualize",
]
