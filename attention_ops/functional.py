"""The public functions: a mask becomes a text and its tensors here; values are checked in the operators."""

import math
import typing

import torch
from torch import Tensor

from . import masks, rotary

__all__ = [
    "COMPUTE_INTENSIVE_OPS",
    "Summaries",
    "attention",
    "attention_summaries",
    "attention_weights",
    "dropout_mask",
    "scaled_dot_product_attention",
]

MaskLike = masks.Mask | str | Tensor | None
OPERATORS = torch.ops.attention_ops

# What a selective checkpoint should keep rather than compute twice: the operators behind the public functions and their
# tangents, as policies see them. A list, for torch.utils.checkpoint.create_selective_checkpoint_contexts.
COMPUTE_INTENSIVE_OPS = [
    OPERATORS._attention_forward.default,
    OPERATORS._attention_jvp.default,
    OPERATORS._attention_weights.default,
    OPERATORS._attention_weights_jvp.default,
    OPERATORS._attention_summaries.default,
    OPERATORS._attention_summaries_jvp.default,
]


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
    rope: rotary.Rope | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, forward and backward in memory linear in the lengths.

        s_ij = softcap(scale q_i . k_j) + bias_ij, where visible         softcap(x) = c tanh(x / c)
        lse_i = log(sum_j exp(s_ij) + exp(sink))
        out_i = sum_j dropout(exp(s_ij - lse_i)) v_j

    A row that sees no key gives 0, with lse -inf (the sink's value if there is one) and gradients 0. With what depends
    on the distance alone, at entry n = j - i + Lq - 1 (see `attention_ops.position`), the formula becomes

        s_ij = softcap(scale q_i . (k_j + relative_key_n)) + bias_ij + distance_bias_n
        out_i = sum_j dropout(exp(s_ij - lse_i)) (v_j + relative_value_n)

    Args:
        query: [B, H, Lq, D]; also [Lq, D], [H, Lq, D] and more leading dimensions, which broadcast as in matmul.
        key: [B, Hkv, Lk, D], where Hkv divides H: each key head serves H / Hkv query heads.
        value: [B, Hkv, Lk, Dv].
        bias: added to the scores, [B|1, H|1, Lq|1, Lk|1], of query's type or float32; -inf masks its place.
        mask: a value of `attention_ops.masks`, its text if it has no tensors, or a boolean tensor that broadcasts
            against [B, H, Lq, Lk]; True means may attend.
        sinks: [H], one more logit in the denominator of each head.
        scale: any finite number; 1/sqrt(D) if None.
        softcap: c > 0; none if None.
        dropout_p: the probability of dropping a weight, in steps of 2^-16; kept ones are scaled by 1/(1 - p).
            Applied whenever it is not 0: pass 0 in evaluation.
        seed: int64 [1], or [B, 2] with a seed and a batch number in each row; drawn from torch's generator if None.
        return_lse: whether to return lse [B, H, Lq] too (float32 for half types); it is differentiable.
        distance_bias: [B|1, H|1, Lq + Lk - 1], of query's type or float32; -inf masks its distance.
        relative_key: [B|1, H|1, Lq + Lk - 1, D], of query's type or float32.
        relative_value: [B|1, H|1, Lq + Lk - 1, Dv], of query's type or float32.
        rope: a `rotary.Rope`, by which query and key are rotated.

    Returns:
        out [B, H, Lq, Dv] in query's type, or (out, lse).

    Raises:
        ValueError: for shapes and numbers that do not fit; TypeError: for types that do not.

    >>> query, key, value = (torch.randn(2, 4, 5, 8, requires_grad=True) for _ in range(3))
    >>> out = attention(query, key, value, mask=masks.causal() & masks.padding(torch.tensor([5, 3])))
    >>> out.sum().backward()
    >>> out.shape, key.grad.shape
    (torch.Size([2, 4, 5, 8]), torch.Size([2, 4, 5, 8]))

    Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762; computed as in Dao et al.,
    FlashAttention, 2022, https://arxiv.org/abs/2205.14135.
    """
    _check_tensors("attention", query=query, key=key, value=value)
    query, key, turns = rope.prepare(query, key) if _turns("attention", rope, query, key) else (query, key, {})
    by_distance = {"distance_bias": distance_bias, "relative_key": relative_key, "relative_value": relative_value}
    data, options = _given("attention", mask, scale, softcap, bias=bias, sinks=sinks, **by_distance)
    options |= turns
    if dropout_p != 0:
        options["dropout_p"] = dropout_p
        if seed is None and rotary.is_dtensor(query):  # each device would draw its own
            raise ValueError("attention: expected seed a Tensor with dropout of DTensors, got None")
    if seed is not None:
        _check_tensors("attention", seed=seed)
        options["seed"] = seed
    out, lse = OPERATORS.attention(query, key, value, data, **options)
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
    rope: rotary.Rope | None = None,
) -> Tensor:
    """The attention weights themselves, before dropout, of all or of chosen heads and rows.

        w_ij = exp(s_ij - lse_i)

    Rows sum to 1; to less with a sink, which takes its share, and to 0 where no key is visible.

    Args:
        query, key, bias, mask, sinks, scale, softcap, distance_bias, relative_key, rope: as in
            `attention`.
        heads: int64 [n], the heads to return, in this order; all if None.
        rows: int64 [n], the queries to return, in this order; all if None.
        average: whether to return the mean over those heads.

    Returns:
        [B, heads, rows, Lk], or [B, rows, Lk] with `average`, in query's type; differentiable.

    Raises:
        ValueError: for shapes and numbers that do not fit; TypeError: for types that do not.

    >>> query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    >>> weights = attention_weights(query, key, rows=torch.tensor([4]), average=True)
    >>> weights.shape, round(weights.sum().item(), 4)
    (torch.Size([1, 1, 7]), 1.0)

    Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762.
    """
    selection = {name: x for name, x in (("heads", heads), ("rows", rows)) if x is not None}
    _check_tensors("attention_weights", query=query, key=key, **selection)
    query, key = _rotated("attention_weights", rope, query, key)
    by_distance = {"distance_bias": distance_bias, "relative_key": relative_key}
    data, options = _given("attention_weights", mask, scale, softcap, bias=bias, sinks=sinks, **by_distance)
    return OPERATORS.attention_weights(query, key, data, **options, **selection, average=average)


class Summaries(typing.NamedTuple):
    """What `attention_summaries` returns."""

    column_sum: Tensor
    entropy: Tensor
    maximum: Tensor


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
    rope: rotary.Rope | None = None,
) -> Summaries:
    """Where attention goes and how sharp it is, without the matrix of weights in memory.

        column_sum_j = sum_i w_ij        entropy_i = -sum_j w_ij log w_ij        maximum_i = max_j w_ij

    Args:
        query, key, bias, mask, sinks, scale, softcap, distance_bias, relative_key, rope: as in
            `attention`.

    Returns:
        column_sum [B, H, Lk] (coverage), entropy [B, H, Lq] in nats, maximum [B, H, Lq]; in lse's type,
        differentiable, the maximum through the first of equal places.

    Raises:
        ValueError: for shapes and numbers that do not fit; TypeError: for types that do not.

    >>> summaries = attention_summaries(torch.zeros(1, 1, 2, 8), torch.randn(1, 1, 4, 8))
    >>> summaries.column_sum.round(decimals=4).tolist(), summaries.maximum.round(decimals=4).tolist()
    ([[[0.5, 0.5, 0.5, 0.5]]], [[[0.25, 0.25]]])

    Coverage: Tu et al., Modeling Coverage for Neural Machine Translation, 2016, https://arxiv.org/abs/1601.04811.
    """
    _check_tensors("attention_summaries", query=query, key=key)
    query, key = _rotated("attention_summaries", rope, query, key)
    by_distance = {"distance_bias": distance_bias, "relative_key": relative_key}
    data, options = _given("attention_summaries", mask, scale, softcap, bias=bias, sinks=sinks, **by_distance)
    return Summaries(*OPERATORS.attention_summaries(query, key, data, **options))


def dropout_mask(seed: Tensor, batch: int, heads: int, queries: int, keys: int, dropout_p: float) -> Tensor:
    """Which weights `attention` keeps with this seed, as a boolean tensor.

        kept_ij = philox(seed; batch, head, i, j) >= round(65536 p)      with 16 bits for each place

    Args:
        seed: int64 [1], or [B, 2] with a seed and a batch number in each row.
        batch, heads, queries, keys: the shape.
        dropout_p: the probability of dropping.

    Returns:
        [batch, heads, queries, keys], True where kept.

    Raises:
        ValueError: for a seed of another shape or a p outside 0 to 1; TypeError: for a seed of another type.

    >>> kept = dropout_mask(torch.tensor([1]), 1, 2, 100, 100, 0.25)
    >>> 0.73 < kept.float().mean().item() < 0.77
    True

    Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
    """
    _check_tensors("dropout_mask", seed=seed)
    return OPERATORS.dropout_mask(seed, batch, heads, queries, keys, dropout_p)


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
            float32 (added to the scores; -inf masks).
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
    _check_tensors(SDPA, query=query, key=key, value=value)
    if attn_mask is not None:
        _check_tensors(SDPA, attn_mask=attn_mask)
    if is_causal and attn_mask is not None:
        raise ValueError(
            f"{SDPA}: expected attn_mask None with is_causal, got a tensor of {attn_mask.dim()} dimensions"
        )
    if dropout_p != 0 and rotary.is_dtensor(query):
        raise ValueError(f"{SDPA}: expected dropout_p 0 for DTensors (attention takes a seed), got {dropout_p}")
    query, key, value, leading = _four_dimensions(query, key, value, enable_gqa)
    bias, mask = None, masks.causal("upper_left") if is_causal else None
    if attn_mask is not None:
        attn_mask = _four_dimensional_mask(attn_mask, leading, query, key)
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    out = attention(query, key, value, bias=bias, mask=mask, scale=scale, dropout_p=dropout_p)  # [B, H, Lq, Dv]
    return out if query.dim() == len(leading) + 2 else out.reshape(*leading, *out.shape[-2:])


SDPA = "scaled_dot_product_attention"


def _check_tensors(operator: str, **arguments: object) -> None:
    """The dispatcher's own message would name neither the argument in our grammar nor a type of error users expect."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{operator}: expected {name} a Tensor, got {type(x).__name__}")


def _turns(operator: str, rope: rotary.Rope | None, query: Tensor, key: Tensor) -> bool:
    if rope is None or min(query.dim(), key.dim()) < 2:  # which the operator refuses
        return False
    if not isinstance(rope, rotary.Rope):
        raise TypeError(f"{operator}: expected rope a rotary.Rope, got {type(rope).__name__}")
    return True


def _rotated(operator: str, rope: rotary.Rope | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return rope.rotate(query, key) if _turns(operator, rope, query, key) else (query, key)


def _given(
    operator: str, mask: MaskLike, scale: float | None, softcap: float | None, **tensors: Tensor | None
) -> tuple[list[Tensor], dict[str, object]]:
    """The tensors of the mask, and those of the other shared options that are not None. The dispatcher works on every
    argument that it gets: in a small call each one left to its default is time saved."""
    data: list[Tensor] = []
    options: dict[str, object] = {name: x for name, x in tensors.items() if x is not None}
    if options:
        _check_tensors(operator, **options)
    if mask is not None:
        options["mask"], data = _spec_and_data(operator, mask)
    if scale is not None:
        options["scale"] = scale
    if softcap is not None:
        options["softcap"] = softcap
    return data, options


def _spec_and_data(operator: str, mask: masks.Mask | str | Tensor) -> tuple[str, list[Tensor]]:
    if isinstance(mask, masks.Mask):
        return mask.spec, list(mask.data)
    if isinstance(mask, Tensor):
        return "dense", [mask]
    if isinstance(mask, str):
        return mask, []
    raise TypeError(f"{operator}: expected mask a Mask, a str or a Tensor, got {type(mask).__name__}")


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
