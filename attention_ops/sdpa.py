"""The drop-in for torch's own function, with its arguments."""

import math

import torch
from torch import Tensor

from . import masks, rotary
from .functional import attention, check_number, check_tensors, is_causal_bias

__all__ = ["scaled_dot_product_attention"]

SDPA = "scaled_dot_product_attention"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with its arguments and their meaning.

        out = dropout(softmax(scale query key' + attn_mask)) value

    Args:
        query: [N, ..., H, L, E].
        key: [N, ..., H, S, E]; leading dimensions broadcast.
        value: [N, ..., H, S, Ev].
        attn_mask: broadcasts against [N, ..., H, L, S]; boolean (True means may attend), or of query's type or
            float32 (added to the scores; -inf masks). Also a `torch.nn.attention.bias.CausalBias` of these lengths.
        dropout_p: the probability of dropping a weight, also in evaluation.
        is_causal: query i sees the keys j <= i, whatever the lengths; not together with `attn_mask`.
        scale: 1/sqrt(E) if None.
        enable_gqa: whether key and value may have fewer heads than query, each serving a group.

    Returns:
        [N, ..., H, L, Ev]; 0 in rows that see no key.

    Raises:
        ValueError: for shapes and numbers that do not fit; TypeError: for types that do not.

    >>> query, key, value = torch.randn(3, 2, 4, 5, 8).unbind(0)
    >>> ours = scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-5)
    True

    Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762.
    """
    check_tensors(SDPA, query=query, key=key, value=value)
    check_number(SDPA, "scale", scale)
    if attn_mask is not None and not is_causal_bias(attn_mask):
        _check_mask(attn_mask, query)
    if is_causal and attn_mask is not None:
        raise ValueError(
            f"{SDPA}: expected attn_mask None with is_causal, got a tensor of {attn_mask.dim()} dimensions"
        )
    if dropout_p != 0 and rotary.is_dtensor(query):
        raise ValueError(f"{SDPA}: expected dropout_p 0 for DTensors (attention takes a seed), got {dropout_p}")
    mask = masks.causal("upper_left") if is_causal else None
    if is_causal_bias(attn_mask):
        attn_mask, mask = None, _mask_of(attn_mask, query, key)
    query, key, value, leading = _four_dimensions(query, key, value, enable_gqa)
    bias = None
    if attn_mask is not None:
        attn_mask = _four_dimensional_mask(attn_mask, leading, query, key)
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    out = attention(query, key, value, bias=bias, mask=mask, scale=scale, dropout_p=dropout_p)  # [B, H, Lq, Dv]
    return out if query.dim() == len(leading) + 2 else out.reshape(*leading, *out.shape[-2:])


def _mask_of(causal_bias: Tensor, query: Tensor, key: Tensor) -> masks.Mask:
    lengths = [causal_bias.seq_len_q, causal_bias.seq_len_kv]
    if lengths != (wanted := [query.shape[-2], key.shape[-2]]):
        raise ValueError(f"{SDPA}: expected attn_mask of lengths {wanted} as in query and key, got {lengths}")
    return masks.causal(causal_bias.variant.name.lower())


def _check_mask(attn_mask: object, query: Tensor) -> None:
    """What `attention` would say of its own bias or mask."""
    check_tensors(SDPA, attn_mask=attn_mask)
    if attn_mask.layout != torch.strided:
        raise TypeError(f"{SDPA}: expected attn_mask layout torch.strided, got {attn_mask.layout}")
    types = [torch.bool, torch.float32, query.dtype]
    if query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type):
        types += [torch.bfloat16, torch.float16]
    if attn_mask.dtype not in types:
        wanted = f"bool, float32 or {query.dtype} as in query"
        raise TypeError(f"{SDPA}: expected attn_mask dtype {wanted}, got {attn_mask.dtype}")


def _four_dimensions(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """[B, H, L, D] of all three after broadcasting, and the leading dimensions that the result has."""
    given = (query, key, value)
    if all(tensor.dim() == 4 and tensor.shape[:2] == query.shape[:2] for tensor in given):
        return query, key, value, query.shape[:2]
    for name, tensor in zip(("query", "key", "value"), given, strict=True):
        if tensor.dim() < 2:
            raise ValueError(f"{SDPA}: expected {name} with at least 2 dimensions [..., L, D], got {tensor.dim()}")
    if enable_gqa and all(tensor.dim() >= 3 for tensor in given):
        batch = _broadcast(*(tensor.shape[:-3] for tensor in given))
        wanted = [(*batch, tensor.shape[-3]) for tensor in given]
    else:
        wanted = [_broadcast(*(tensor.shape[:-2] for tensor in given))] * 3
    flat = [
        _flatten(tensor.expand(*leading, *tensor.shape[-2:])) for tensor, leading in zip(given, wanted, strict=True)
    ]
    return flat[0], flat[1], flat[2], wanted[0]


def _broadcast(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(query, key, value))
    except RuntimeError as error:
        shapes = ", ".join(str(list(shape)) for shape in (key, value))
        wanted = f"leading dimensions that broadcast with {list(query)} (or enable_gqa for fewer heads)"
        raise ValueError(f"{SDPA}: expected key and value with {wanted} as in query, got {shapes}") from error


def _flatten(tensor: Tensor) -> Tensor:
    """[..., H, L, D] as [B, H, L, D]."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _four_dimensional_mask(mask: Tensor, leading: tuple[int, ...], query: Tensor, key: Tensor) -> Tensor:
    """[B|1, H|1, Lq|1, Lk|1] of a mask that broadcasts against [*leading, Lq, Lk]; only its batch is ever copied."""
    wanted = (*leading, query.shape[-2], key.shape[-2])
    fits = mask.dim() <= len(wanted) and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(wanted), strict=False)
    )
    if not fits:
        raise ValueError(f"{SDPA}: expected attn_mask that broadcasts against {list(wanted)}, got {list(mask.shape)}")
    mask = mask[(None,) * (len(wanted) - mask.dim())]
    batch = leading[:-1]
    if math.prod(mask.shape[:-3]) > 1:
        mask = mask.expand(*batch, *mask.shape[-3:])
    return _flatten(mask)
