"""Every operator from its formula, in plain torch: slow, of any type, differentiable to any order.

s = softcap(scale q (k + a)') + bias + r, masked        lse = log(sum_j exp s + exp sink)
w = exp(s - lse)                                        out = (dropout(w)) (v + b)

with r, a and b by distance, entry j - i + Lq - 1 of distance_bias, relative_key and relative_value.
"""

import math

import torch
from torch import Tensor

from . import masks, position, rotary

__all__ = ["attention", "attention_summaries", "attention_weights", "dropout_mask", "philox", "rope"]

MaskLike = masks.Mask | str | Tensor | None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None = None,
    mask: MaskLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    return_lse: bool = False,
    distance_bias: Tensor | None = None,
    relative_key: Tensor | None = None,
    relative_value: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention on [B, H, L, D] by its formula; the arguments are those of `attention_ops.attention`.

    >>> one = torch.ones(1, 1, 2, 4)
    >>> attention(one, one, one).shape
    torch.Size([1, 1, 2, 4])
    """
    visible = _visible(query, key, bias, distance_bias, mask)
    query, key, value = _without_masked_rows(visible, query, key, value)
    relative = _relative(query, relative_key, visible)
    weights, lse = _weights_and_lse(query, key, visible, relative, bias, distance_bias, sinks, scale, softcap)
    if dropout_p > 0:
        if seed is None:
            raise ValueError("reference.attention: expected seed with dropout, got None")
        kept = dropout_mask(seed, *weights.shape, dropout_p)
        share = 1 - _dropped_of_65536(dropout_p) / 65536  # of the weights, on average, is kept
        weights = weights * kept / share if share > 0 else weights * 0
    out = weights.to(value.dtype) @ _repeat(value, query.shape[1])
    if relative_value is not None:
        out = out + torch.einsum("bhij,bhijd->bhid", weights.to(value.dtype), _by_distance(relative_value, visible))
    return (out, lse) if return_lse else out


def attention_weights(
    query: Tensor,
    key: Tensor,
    *,
    bias: Tensor | None = None,
    mask: MaskLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    heads: Tensor | None = None,
    rows: Tensor | None = None,
    average: bool = False,
    distance_bias: Tensor | None = None,
    relative_key: Tensor | None = None,
) -> Tensor:
    """The weights [B, H, Lq, Lk] of some heads and rows, or their mean over the heads [B, Lq, Lk].

    >>> attention_weights(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4)).tolist()
    [[[[0.5, 0.5]]]]
    """
    visible = _visible(query, key, bias, distance_bias, mask)
    query, key, _ = _without_masked_rows(visible, query, key, key)
    relative = _relative(query, relative_key, visible)
    weights, _ = _weights_and_lse(query, key, visible, relative, bias, distance_bias, sinks, scale, softcap)
    weights = weights if heads is None else weights.index_select(1, heads)
    weights = weights if rows is None else weights.index_select(2, rows)
    return (weights.mean(1) if average else weights).to(query.dtype)


def attention_summaries(
    query: Tensor,
    key: Tensor,
    *,
    bias: Tensor | None = None,
    mask: MaskLike = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    distance_bias: Tensor | None = None,
    relative_key: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the weights sum to in each column, and the entropy and the maximum of each row.

    >>> attention_summaries(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 2, 4))[0].tolist()
    [[[0.5, 0.5]]]
    """
    options = {"bias": bias, "mask": mask, "sinks": sinks, "scale": scale, "softcap": softcap}
    by_distance = {"distance_bias": distance_bias, "relative_key": relative_key}
    weights = attention_weights(query, key, **options, **by_distance)  # [B, H, Lq, Lk]
    entropy = -(weights * torch.where(weights > 0, weights, 1).log()).sum(-1)
    if weights.shape[-1] == 0:
        return weights.sum(-2), entropy, weights.sum(-1)
    first = weights.detach().argmax(-1, keepdim=True)
    return weights.sum(-2), entropy, weights.gather(-1, first)[..., 0]


def dropout_mask(seed: Tensor, batch: int, heads: int, queries: int, keys: int, dropout_p: float) -> Tensor:
    """Which weights dropout keeps, [B, H, Lq, Lk]: 16 bits of Philox for each place, against round(65536 p).

    `seed` is int64: [1], or [B, 2] with a seed and a batch number in each row.

    >>> dropout_mask(torch.tensor([7]), 1, 1, 1, 3, 0.0).tolist()
    [[[[True, True, True]]]]
    """
    device = seed.device
    key, number = (seed[:, 0], seed[:, 1]) if seed.dim() == 2 else (seed, torch.arange(batch, device=device))
    key, number = key[:, None, None, None], number[:, None, None, None]
    group = torch.arange((keys + 7) // 8, device=device)
    row = torch.arange(queries, device=device)[:, None]
    head = torch.arange(heads, device=device)[:, None, None]
    words = philox(group, row, head, number & LOW, key & LOW, (key >> 32) & LOW)
    words = [word.expand(batch, heads, queries, len(group)) for word in words]
    halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], -1)  # [B, H, Lq, groups, 8]
    return (halves >= _dropped_of_65536(dropout_p)).flatten(-2)[..., :keys]


def _dropped_of_65536(dropout_p: float) -> int:
    return math.floor(dropout_p * 65536 + 0.5)


def rope(
    x: Tensor,
    frequencies: rotary.Frequencies,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    layout: str = "half",
) -> Tensor:
    """Rotary positions by complex numbers: each pair (a, b) is a + bi, times factor e^(it); in float64 inside.

    Differentiable in x, positions and inverse frequencies.

    >>> turn = rotary.Frequencies(torch.tensor([math.pi / 2], dtype=torch.float64))
    >>> rope(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), turn).round(decimals=6).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    inverse, factor, axes = frequencies
    pairs = len(inverse)
    positions = torch.arange(x.shape[-2]) if positions is None else positions
    positions = positions[..., None, :] if not axes else positions  # [..., axes, L]
    if isinstance(offset, Tensor):
        offset = offset[..., None, None]
    position = (positions + offset).double()[..., list(axes) or [0] * pairs, :].mT  # [..., L, pairs]
    angle = (position * inverse).unsqueeze(-3) if position.dim() > 2 else position * inverse  # one for all heads
    turned, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
    split = turned.unflatten(-1, (2, pairs)).mT if layout == "half" else turned.unflatten(-1, (pairs, 2))
    rotated = torch.complex(*split.unbind(-1)) * torch.polar(torch.full_like(angle, factor), angle)
    both = torch.stack((rotated.real, rotated.imag), -1)  # [..., L, pairs, 2]
    both = (both.mT if layout == "half" else both).flatten(-2)
    return torch.cat((both.to(x.dtype), rest), -1)


LOW = 0xFFFFFFFF


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key0: Tensor, key1: Tensor) -> list[Tensor]:
    """Philox4x32-10 of a counter and a key, as four words of 32 bits held in int64 (Salmon et al., 2011).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> hex(philox(*[zero] * 6)[0].item())
    '0x6627e8d5'
    """
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) & LOW, (key1 + 0xBB67AE85) & LOW
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of two 32-bit words, by halves because int64 would overflow."""
    low, high = factor * (word & 0xFFFF), factor * (word >> 16)  # both below 2^48
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _by_distance(rows: Tensor, visible: Tensor) -> Tensor:
    """[B, H, Lq, Lk, width] of a table [B|1, H|1, Lq + Lk - 1, width]; 0 where a pair is masked."""
    queries, keys = visible.shape[-2:]
    rows = rows[(None,) * (4 - rows.dim())]
    pairs = position.expand(rows.mT, queries, keys).movedim(2, -1)  # [B|1, H|1, Lq, Lk, width]
    return torch.where(visible[..., None], pairs, 0)


def _relative(query: Tensor, relative_key: Tensor | None, visible: Tensor) -> Tensor | float:
    """q a' [B, H, Lq, Lk]"""
    if relative_key is None:
        return 0.0
    return torch.einsum("bhid,bhijd->bhij", query, _by_distance(relative_key, visible))


def _visible(query: Tensor, key: Tensor, bias: Tensor | None, distance_bias: Tensor | None, mask: MaskLike) -> Tensor:
    batch, heads, queries, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    if mask is None or (isinstance(mask, str) and not mask.strip()):
        visible = torch.ones(batch, heads, queries, keys, dtype=torch.bool, device=query.device)
    else:
        mask = masks.parse(mask) if isinstance(mask, str) else masks.dense(mask) if isinstance(mask, Tensor) else mask
        visible = mask.predicate(masks.Places(batch, heads, queries, keys, query.device))
    if bias is not None:
        visible = visible & (bias.detach() != -math.inf)
    if distance_bias is not None:
        visible = visible & (position.expand(distance_bias.detach(), queries, keys) != -math.inf)
    return visible.expand(batch, heads, queries, keys)


def _without_masked_rows(visible: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero in place of keys and values that nobody sees and of queries that see nothing, so that a NaN stored
    there meets no product, in the backward pass either."""
    seen = visible.any(2).unflatten(1, (key.shape[1], -1)).any(2) if key.shape[1] else visible.any(2)  # [B, Hkv, Lk]
    seen, sees = seen[..., None], visible.any(3)[..., None]
    return torch.where(sees, query, 0), torch.where(seen, key, 0), torch.where(seen, value, 0)


def _weights_and_lse(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    relative: Tensor | float,
    bias: Tensor | None,
    distance_bias: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    scale = (1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0) if scale is None else scale
    scores = scale * (query @ _repeat(key, query.shape[1]).mT + relative)  # [B, H, Lq, Lk]
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + torch.where(bias == -math.inf, 0, bias)
    if distance_bias is not None:
        by_distance = position.expand(distance_bias, *visible.shape[-2:])
        scores = scores + torch.where(by_distance == -math.inf, 0, by_distance)
    sink = None if sinks is None else sinks[:, None].to(scores.dtype)  # [H, 1]
    shift = _maximum(torch.where(visible, scores.detach(), -math.inf), sink)  # [B, H, Lq]
    powers = torch.where(visible, torch.where(visible, scores - shift[..., None], 0).exp(), 0)
    total = powers.sum(-1) if sink is None else powers.sum(-1) + (sink - shift).exp()
    empty = total == 0
    divisor = torch.where(empty, 1, total)
    return powers / divisor[..., None], torch.where(empty, -math.inf, shift + divisor.log())


def _maximum(scores: Tensor, sink: Tensor | None) -> Tensor:
    """The shift that keeps exp in range: a constant of the formula, so it has no gradient. 0 for an empty row."""
    floor = scores.new_full(scores.shape[:-1], -math.inf)
    maximum = scores.amax(-1) if scores.shape[-1] else floor
    if sink is not None:
        maximum = torch.maximum(maximum, sink.detach())
    return torch.where(maximum == -math.inf, 0, maximum)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    """Each key or value head once for every query head of its group."""
    given = tensor.shape[1]
    return tensor if given == heads else tensor.repeat_interleave(heads // given, 1)
