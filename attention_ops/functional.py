"""The public functions: a mask becomes a text and its tensors here; values are checked in the operators."""

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
]

MaskLike = masks.Mask | str | Tensor | None
OPERATORS = torch.ops.attention_ops
# Looking for an overload would take a tenth of a small call.
ATTENTION, PLAIN_ATTENTION = OPERATORS.attention.default, OPERATORS.attention.plain

# What a selective checkpoint should keep rather than compute twice: the operators behind the public functions and their
# tangents, as policies see them. A list, for torch.utils.checkpoint.create_selective_checkpoint_contexts.
COMPUTE_INTENSIVE_OPS = [
    OPERATORS._attention_forward.default,
    OPERATORS._rotary_attention_forward.default,
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
        bias: added to the scores, [B|1, H|1, Lq|1, Lk|1], of query's type or float32; -inf masks its place. A finite
            one beyond two thirds of the range counts as its end, as in sinks.
        mask: a value of `attention_ops.masks`, its text if it has no tensors, or a boolean tensor that broadcasts
            against [B, H, Lq, Lk]; True means may attend, the opposite of `torch.nn.MultiheadAttention`'s masks.
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
        out [B, H, Lq, Dv] in query's type, or (out, lse). For the weights, call `attention_weights`.

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
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        check_tensors("attention", query=query, key=key, value=value)
    spec, data = ("", []) if mask is None else _spec_and_data("attention", mask)
    # In one look: a small call spends as long here as in its kernel.
    no_tensors = bias is sinks is seed is distance_bias is relative_key is relative_value is None and not data
    if no_tensors and rope is scale is softcap is None and not isinstance(dropout_p, Tensor) and dropout_p == 0:
        out, lse = PLAIN_ATTENTION(query, key, value, spec)
    else:
        options = _given("attention", scale, softcap, bias, sinks, distance_bias, relative_key, relative_value)
        if rope is not None and _turns("attention", rope, query, key):
            options |= rope.options(query, key, value)
        check_number("attention", "dropout_p", dropout_p)
        if dropout_p != 0:
            options["dropout_p"] = dropout_p
            if seed is None and rotary.is_dtensor(query):  # each device would draw its own
                raise ValueError("attention: expected seed a Tensor with dropout of DTensors, got None")
        if seed is not None:
            check_tensors("attention", seed=seed)
            options["seed"] = seed
        out, lse = ATTENTION(query, key, value, data, spec, **options)
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
    check_tensors("attention_weights", query=query, key=key, **selection)
    query, key = _rotated("attention_weights", rope, query, key)
    spec, data = _spec_and_data("attention_weights", mask)
    options = _given("attention_weights", scale, softcap, bias, sinks, distance_bias, relative_key)
    return OPERATORS.attention_weights(query, key, data, spec, **options, **selection, average=average)


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
    check_tensors("attention_summaries", query=query, key=key)
    query, key = _rotated("attention_summaries", rope, query, key)
    spec, data = _spec_and_data("attention_summaries", mask)
    options = _given("attention_summaries", scale, softcap, bias, sinks, distance_bias, relative_key)
    return Summaries(*OPERATORS.attention_summaries(query, key, data, spec, **options))


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
    check_tensors("dropout_mask", seed=seed)
    return OPERATORS.dropout_mask(seed, batch, heads, queries, keys, dropout_p)


def check_tensors(operator: str, **arguments: object) -> None:
    """The dispatcher's own message would name neither the argument in our grammar nor a type of error users expect."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor) or is_causal_bias(x):
            raise TypeError(f"{operator}: expected {name} a Tensor, got {type(x).__name__}")


def is_causal_bias(x: object) -> bool:
    """Whether x is of torch.nn.attention.bias: a Tensor of another shape than it says, of numbers that nobody wrote.
    By its name, since that import takes seconds."""
    return type(x).__name__ == "CausalBias"


def check_number(operator: str, name: str, x: object) -> None:
    """The dispatcher would take a Tensor's value, and drop its gradient."""
    if isinstance(x, Tensor):
        raise TypeError(f"{operator}: expected {name} a number, got {type(x).__name__}")


def _turns(operator: str, rope: rotary.Rope | None, query: Tensor, key: Tensor) -> bool:
    """Whether there is something to rotate: what the operator refuses anyway is left to it."""
    if rope is None or any(x.dim() < 2 or x.dtype not in TYPES or x.layout != torch.strided for x in (query, key)):
        return False
    if not isinstance(rope, rotary.Rope):
        raise TypeError(f"{operator}: expected rope a rotary.Rope, got {type(rope).__name__}")
    if query.shape[-2] > key.shape[-2]:
        wanted = f"query length of at most {key.shape[-2]} as in key, with rope"
        raise ValueError(f"{operator}: expected {wanted}, got {query.shape[-2]}")
    return True


def _rotated(operator: str, rope: rotary.Rope | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if not _turns(operator, rope, query, key):
        return query, key
    device = query.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):  # as in `attention`: rounded, then rotated
        dtype = torch.get_autocast_dtype(device)
        query, key = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key))
    return rope.rotate(query, key)


TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TENSORS = ("bias", "sinks", "distance_bias", "relative_key", "relative_value")


def _given(operator: str, scale: float | None, softcap: float | None, *tensors: Tensor | None) -> dict[str, object]:
    """The shared options that are not None, for the dispatcher works on every argument that it gets; the tensors are
    TENSORS, or the first of them."""
    options: dict[str, object] = {}
    for name, x in zip(TENSORS, tensors, strict=False):
        if x is not None:
            options[name] = x
    if options:
        check_tensors(operator, **options)
    if scale is not None:
        check_number(operator, "scale", scale)
        options["scale"] = scale
    if softcap is not None:
        check_number(operator, "softcap", softcap)
        options["softcap"] = softcap
    return options


def _spec_and_data(operator: str, mask: MaskLike) -> tuple[str, list[Tensor]]:
    if mask is None:
        return "", []
    if isinstance(mask, masks.Mask):
        return mask.spec, list(mask.data)
    if isinstance(mask, Tensor):
        return "dense", [mask]
    if isinstance(mask, str):
        return mask, []
    raise TypeError(f"{operator}: expected mask a Mask, a str or a Tensor, got {type(mask).__name__}")
