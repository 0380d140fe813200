"""Positions that are added: sinusoids to inputs, and to scores, keys and values what depends on the distance.

A *distance bias* [B|1, H|1, Lq + Lk - 1] says what is added to the score of query i and key j by their distance alone,

    d = j - (i + Lk - Lq)        at entry d + Lk - 1 = j - i + Lq - 1

which is key minus query when the last query stands at the last key, as in `masks.causal`; so a step with one query and
a cache of keys needs no offset, and padding on the left changes nothing. Where samples are padded on the right, so that
the last query of each stands at a key of its own, `offset` [B] says how many keys that is before the last; every
distance is then so much larger, and the table has a row for each sample. `distances` gives d for every entry, each
scheme here is a function of it, for `attention(distance_bias=...)`. `expand` turns a distance bias into a dense one.
Rows by distance [B|1, H|1, Lq + Lk - 1, D], for `relative_key` and `relative_value`, have the same order.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "alibi",
    "alibi_slopes",
    "axial_window",
    "clipped",
    "distances",
    "expand",
    "kerple_log",
    "kerple_power",
    "left_padded",
    "relative_rows",
    "sinusoidal",
    "t5",
    "t5_buckets",
    "transformer_xl",
    "window",
    "window_index",
]


def distances(queries: int, keys: int, *, offset: int | Tensor = 0, device: torch.device | str | None = None) -> Tensor:
    """The distance d of every entry of a distance bias, int64 [Lq + Lk - 1]: from 1 - Lk to Lq - 1, plus `offset`;
    [B, Lq + Lk - 1] for an offset [B].

    >>> distances(2, 3).tolist()
    [-2, -1, 0, 1]
    """
    if min(queries, keys) < 0:
        raise ValueError(f"distances: expected queries and keys of 0 or more, got {queries} and {keys}")
    if isinstance(offset, Tensor) and offset.dim() > 1:
        raise ValueError(f"distances: expected offset with 0 or 1 dimensions [B], got {offset.dim()}")
    d = torch.arange(1 - keys, queries, device=device) if queries and keys else torch.arange(0, device=device)
    return d + offset[..., None] if isinstance(offset, Tensor) else d + offset


def expand(distance_bias: Tensor, queries: int, keys: int) -> Tensor:
    """The dense bias [..., Lq, Lk] of a distance bias [..., Lq + Lk - 1]; differentiable.

        bias_ij = distance_bias[j - i + Lq - 1]

    >>> expand(distances(2, 3), 2, 3).tolist()
    [[-1, 0, 1], [-2, -1, 0]]
    """
    entries = queries + keys - 1 if queries and keys else 0
    if distance_bias.shape[-1] != entries:
        raise ValueError(f"expand: expected distance_bias length {entries}, got {distance_bias.shape[-1]}")
    if not entries:
        return distance_bias.new_zeros(*distance_bias.shape[:-1], queries, keys)
    return distance_bias.unfold(-1, keys, 1).flip(-2)  # [..., Lq, Lk]


def alibi_slopes(heads: int) -> Tensor:
    """The published slopes of ALiBi for any number of heads, float32 [H].

    With 2^n heads the powers 2^(-8/H), 2^(-16/H), ...; otherwise those of the next smaller 2^n, then every other one of
    the next larger.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Press et al., Train Short, Test Long, 2021, https://arxiv.org/abs/2108.12409.
    """
    if heads < 1:
        raise ValueError(f"alibi_slopes: expected heads of 1 or more, got {heads}")
    smaller = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * n / smaller) for n in range(1, smaller + 1)]
    slopes += [2 ** (-4 * n / smaller) for n in range(1, 2 * smaller + 1, 2)]
    return torch.tensor(slopes[:heads])


def alibi(slopes: Tensor, queries: int, keys: int, *, ahead: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
    """ALiBi's distance bias [1, H, Lq + Lk - 1]: -slope |d|.

    It is symmetric; under a causal mask only d <= 0 is seen and it is the published one. `ahead` gives keys after the
    query slopes [H] of their own. Slopes may be learned.

    >>> alibi(alibi_slopes(8), 2, 2)[0, 0].tolist()
    [-0.5, 0.0, -0.5]

    Press et al., Train Short, Test Long, 2021, https://arxiv.org/abs/2108.12409.
    """
    for name, given in (("slopes", slopes), ("ahead", ahead)):
        if given is not None:
            _check_rank("alibi", name, given, 1)
        if given is not None and len(given) != len(slopes):
            raise ValueError(f"alibi: expected {name} shape [H], got {list(given.shape)}")
    d = _for_heads(distances(queries, keys, offset=offset, device=slopes.device))
    behind = slopes[:, None] * -d.abs()
    return behind if ahead is None else torch.where(d > 0, ahead[:, None] * -d, behind)


def t5_buckets(distance: Tensor, *, bidirectional: bool = True, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """The bucket of each distance d = key - query, int64: small ones have their own, larger ones share by logarithm.

    Both directions have half of the buckets each; one direction has all and puts every key after the query in bucket 0.
    The logarithm is taken in float32, as the original takes it: some bucket borders depend on its rounding.

    >>> t5_buckets(torch.tensor([0, -7, -8, -16, 7])).tolist()
    [0, 7, 8, 10, 23]

    Raffel et al., Exploring the Limits of Transfer Learning (T5), 2019, https://arxiv.org/abs/1910.10683.
    """
    if bidirectional:
        buckets //= 2
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(f"t5_buckets: expected buckets that leave exact ones below {max_distance}, got {exact}")
    first = (distance > 0).long() * buckets if bidirectional else 0
    past = distance.abs() if bidirectional else (-distance).clamp(min=0)
    ratio = past.clamp(min=1).float() / exact
    shared = exact + (ratio.log() / math.log(max_distance / exact) * (buckets - exact)).long()
    return first + torch.where(past < exact, past, shared.clamp(max=buckets - 1))


def t5(
    table: Tensor,
    queries: int,
    keys: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    offset: int | Tensor = 0,
) -> Tensor:
    """T5's distance bias [1, H, Lq + Lk - 1] from its table [buckets, H]; for self-attention (T5 has none in cross-
    attention).

    >>> t5(torch.randn(32, 8), 5, 5).shape
    torch.Size([1, 8, 9])

    Raffel et al., Exploring the Limits of Transfer Learning (T5), 2019, https://arxiv.org/abs/1910.10683.
    """
    _check_rank("t5", "table", table, 2)
    d = distances(queries, keys, offset=offset, device=table.device)
    bucket = t5_buckets(d, bidirectional=bidirectional, buckets=len(table), max_distance=max_distance)
    return _with_batch(table[bucket].mT)


def kerple_log(r1: Tensor, r2: Tensor, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
    """KERPLE's logarithmic distance bias [1, H, Lq + Lk - 1]: -r1 log(1 + r2 |d|), with r1, r2 > 0 of [H].

    >>> kerple_log(torch.ones(2), torch.ones(2), 1, 2)[0, 0].exp().tolist()
    [0.5, 1.0]

    Chi et al., KERPLE, 2022, https://arxiv.org/abs/2205.09921.
    """
    _check_kernels(r1, r2)
    d = _for_heads(distances(queries, keys, offset=offset, device=r1.device)).abs()
    return -(r1[:, None] * torch.log1p(r2[:, None] * d))


def kerple_power(r1: Tensor, r2: Tensor, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
    """KERPLE's power distance bias [1, H, Lq + Lk - 1]: -r1 |d|^r2, with r1 > 0 and 0 < r2 <= 2 of [H].

    >>> kerple_power(torch.ones(2), torch.full((2,), 2.0), 1, 4)[0, 0].tolist()
    [-9.0, -4.0, -1.0, 0.0]

    Chi et al., KERPLE, 2022, https://arxiv.org/abs/2205.09921.
    """
    _check_kernels(r1, r2)
    d = _for_heads(distances(queries, keys, offset=offset, device=r1.device)).abs()
    power = d.clamp(min=1).to(r2.dtype) ** r2[:, None]  # log 0 would meet the gradient of r2
    return r1[:, None] * torch.where(d > 0, -power, 0)


def clipped(table: Tensor, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
    """A learned distance bias [1, H, Lq + Lk - 1] from a table [2 reach + 1, H].

    Row n holds d = n - reach; distances beyond share its ends.

    >>> clipped(torch.arange(3.0)[:, None], 1, 4).tolist()
    [[[0.0, 0.0, 0.0, 1.0]]]

    Shaw et al., Self-Attention with Relative Position Representations, 2018, https://arxiv.org/abs/1803.02155.
    """
    _check_rank("clipped", "table", table, 2)
    index = _clipped_index("clipped", len(table), distances(queries, keys, offset=offset, device=table.device))
    return _with_batch(table[index].mT)


def relative_rows(table: Tensor, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
    """Learned rows by distance [1, H|1, Lq + Lk - 1, D], for keys or for values, from a table [2 reach + 1, D] that all
    heads share, or [H, 2 reach + 1, D].

    Row n of the table holds d = n - reach; distances beyond share its ends.

    >>> relative_rows(torch.arange(3.0)[:, None], 1, 4).flatten().tolist()
    [0.0, 0.0, 0.0, 1.0]

    Shaw et al., Self-Attention with Relative Position Representations, 2018, https://arxiv.org/abs/1803.02155.
    """
    _check_rank("relative_rows", "table", table, 2, 3)
    d = distances(queries, keys, offset=offset, device=table.device)
    index = _clipped_index("relative_rows", table.shape[-2], d)
    table = table if table.dim() == 3 else table[None]
    return table[:, index if index.dim() == 2 else index[None]].transpose(0, 1)  # [B|1, H|1, Lq + Lk - 1, D]


def transformer_xl(
    rows: Tensor, content: Tensor, place: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Transformer-XL's scores as options of `attention`, from projected rows by distance [H, Lq + Lk - 1, D] or
    [B, H, Lq + Lk - 1, D], and its two biases of queries, u (`content`) and v (`place`), [H, D] each.

        s_ij = scale ((q_i + u) . k_j + (q_i + v) . r_(i - j)),    so with query + u:
        relative_key = r [B|1, H, Lq + Lk - 1, D]        distance_bias = scale (v - u) . r [B|1, H, Lq + Lk - 1]

    Returns:
        relative_key, distance_bias. Add u [H, 1, D] to the query yourself.

    >>> rows, u, v = torch.randn(2, 5, 4), torch.randn(2, 4), torch.randn(2, 4)
    >>> [x.shape for x in transformer_xl(rows, u, v)]
    [torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 5])]

    Dai et al., Transformer-XL, 2019, https://arxiv.org/abs/1901.02860.
    """
    _check_rank("transformer_xl", "rows", rows, 3, 4)
    for name, bias in (("content", content), ("place", place)):
        wanted = [rows.shape[-3], rows.shape[-1]]
        if list(bias.shape) != wanted:
            raise ValueError(f"transformer_xl: expected {name} shape {wanted} as in rows, got {list(bias.shape)}")
    scale = 1 / math.sqrt(max(rows.shape[-1], 1)) if scale is None else scale
    rows = rows if rows.dim() == 4 else rows[None]
    return rows, scale * (rows @ (place - content)[..., None])[..., 0]


def window_index(height: int, width: int, *, device: torch.device | str | None = None) -> Tensor:
    """The row of Swin's table for each pair of cells of a window, int64 [h w, h w].

        (y_i - y_j + h - 1)(2 w - 1) + x_i - x_j + w - 1        for query cell i and key cell j, counted row by row

    >>> window_index(1, 2).tolist()
    [[1, 0], [2, 1]]

    Liu et al., Swin Transformer, 2021, https://arxiv.org/abs/2103.14030.
    """
    down, right = _differences(height, width, device)
    return (down + height - 1) * (2 * width - 1) + right + width - 1


def window(table: Tensor, height: int, width: int) -> Tensor:
    """The dense bias [1, H, h w, h w] of a window from Swin's table [(2 h - 1)(2 w - 1), H].

    >>> window(torch.randn(15, 4), 2, 3).shape
    torch.Size([1, 4, 6, 6])

    Liu et al., Swin Transformer, 2021, https://arxiv.org/abs/2103.14030.
    """
    _check_rows("window", "table", table, (2 * height - 1) * (2 * width - 1))
    return table[window_index(height, width, device=table.device)].movedim(-1, 0)[None]


def axial_window(rows: Tensor, columns: Tensor, height: int, width: int) -> Tensor:
    """The dense bias [1, H, h w, h w] of a window from one table for each axis, [2 h - 1, H] and [2 w - 1, H].

    >>> axial_window(torch.randn(3, 4), torch.randn(5, 4), 2, 3).shape
    torch.Size([1, 4, 6, 6])
    """
    _check_rows("axial_window", "rows", rows, 2 * height - 1)
    _check_rows("axial_window", "columns", columns, 2 * width - 1)
    down, right = _differences(height, width, rows.device)
    return (rows[down + height - 1] + columns[right + width - 1]).movedim(-1, 0)[None]


def sinusoidal(
    positions: int | Tensor,
    width: int,
    *,
    offset: int | Tensor = 0,
    base: float = 10000.0,
    layout: str = "interleaved",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Sinusoids of any position, [L, width] or [..., L, width], computed in float64.

        sin(p base^(-2i / width)) at 2i, cos at 2i + 1        "half": all sines, then all cosines

    Args:
        positions: how many, counted from 0, or a tensor [..., L] that says which.
        offset: added to the positions: a number, or a tensor [B], which gives [B, L, width].
        layout: "interleaved" or "half".

    >>> sinusoidal(2, 4).round(decimals=3).tolist()
    [[0.0, 1.0, 0.0, 1.0], [0.8410000205039978, 0.5400000214576721, 0.009999999776482582, 1.0]]

    Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762.
    """
    if layout not in ("half", "interleaved"):
        raise ValueError(f"sinusoidal: expected layout half or interleaved, got {layout!r}")
    if width < 0 or width % 2:
        raise ValueError(f"sinusoidal: expected width even and 0 or more, got {width}")
    if isinstance(offset, Tensor):
        offset = offset[..., None]
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, device=offset.device if isinstance(offset, Tensor) else device)
    if positions.dtype in (torch.bfloat16, torch.float16, torch.bool) or positions.dtype.is_complex:
        raise TypeError(f"sinusoidal: expected positions of integers, float32 or float64, got {positions.dtype}")
    positions = positions.double() + offset
    frequency = base ** (torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / -max(width, 1))
    angle = positions[..., None] * frequency  # [..., L, width / 2]
    parts = (angle.sin().to(dtype), angle.cos().to(dtype))
    return torch.cat(parts, -1) if layout == "half" else torch.stack(parts, -1).flatten(-2)


def left_padded(lengths: Tensor, length: int) -> Tensor:
    """Positions [B, L] of samples that end together: the first token of each is at 0, and so is the padding before it.

    >>> left_padded(torch.tensor([3, 1]), 4).tolist()
    [[0, 0, 1, 2], [0, 0, 0, 0]]
    """
    return (torch.arange(length, device=lengths.device) - (length - lengths[:, None])).clamp(min=0)


def _check_rank(operator: str, name: str, x: Tensor, *ranks: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{operator}: expected {name} a Tensor, got {type(x).__name__}")
    if x.dim() not in ranks:
        raise ValueError(f"{operator}: expected {name} with {' or '.join(map(str, ranks))} dimensions, got {x.dim()}")


def _check_kernels(r1: Tensor, r2: Tensor) -> None:
    _check_rank("kerple", "r1", r1, 1)
    _check_rank("kerple", "r2", r2, 1)
    if r1.shape != r2.shape:
        raise ValueError(f"kerple: expected r1 and r2 shapes [H], got {list(r1.shape)} and {list(r2.shape)}")


def _for_heads(d: Tensor) -> Tensor:
    """Distances [Lq + Lk - 1] or [B, Lq + Lk - 1] as [B|1, 1, Lq + Lk - 1]."""
    return _with_batch(d[..., None, :])


def _with_batch(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x[None]


def _clipped_index(operator: str, rows: int, d: Tensor) -> Tensor:
    if rows % 2 == 0:
        raise ValueError(f"{operator}: expected table with an odd number of rows 2 reach + 1, got {rows}")
    return d.clamp(-(rows // 2), rows // 2) + rows // 2


def _differences(height: int, width: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Query's row minus key's, and the same of columns, [h w, h w] each."""
    cells = torch.arange(height * width, device=device)
    y, x = cells // max(width, 1), cells % max(width, 1)
    return y[:, None] - y, x[:, None] - x


def _check_rows(operator: str, name: str, table: Tensor, rows: int) -> None:
    if len(table) != rows:
        raise ValueError(f"{operator}: expected {name} with {rows} rows, got {len(table)}")
