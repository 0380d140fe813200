"""Modules for positions: rotary, sinusoidal, learned, and biases by distance.

What rotates or is added takes `positions` [L] or [B, L] and an `offset`, a number or one for each sample [B]: a cache
of 5 tokens and one more equals 6 at once. What depends on the distance takes the numbers of queries and keys.
"""

import torch
from torch import Tensor, nn

from .. import position, rotary


class RotaryEmbedding(nn.Module):
    """`attention_ops.rope` with its options: query or key [B, H, L, D] in, the same rotated out.

    It stores no tables, so no cast, device or earlier offset can make one wrong.

    Args:
        rotary_dim, base, layout, scaling: as in `attention_ops.rope`.

    >>> rotate, x = RotaryEmbedding(), torch.randn(1, 2, 6, 8)
    >>> torch.equal(rotate(x)[:, :, 5:], rotate(x[:, :, 5:], offset=5))
    True

    Su et al., RoFormer, 2021, https://arxiv.org/abs/2104.09864.
    """

    def __init__(
        self,
        rotary_dim: int | None = None,
        *,
        base: float = rotary.BASE,
        layout: str = "half",
        scaling: rotary.Scaling | None = None,
    ) -> None:
        super().__init__()
        self.options = {"rotary_dim": rotary_dim, "base": base, "layout": layout, "scaling": scaling}

    def forward(self, x: Tensor, *, positions: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        return rotary.rope(x, positions=positions, offset=offset, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


class SinusoidalPositions(nn.Module):
    """Adds sinusoids to x [..., L, width].

    Args:
        width: the width of x, even.
        base, layout: as in `position.sinusoidal`.

    >>> add, x = SinusoidalPositions(8), torch.randn(2, 6, 8)
    >>> torch.equal(add(x)[:, 5:], add(x[:, 5:], offset=5))
    True

    Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762.
    """

    def __init__(self, width: int, *, base: float = 10000.0, layout: str = "interleaved") -> None:
        super().__init__()
        self.width, self.base, self.layout = width, base, layout

    def forward(self, x: Tensor, *, positions: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        _check_width("SinusoidalPositions", x, self.width)
        _check_places("SinusoidalPositions", x, positions)
        places = x.shape[-2] if positions is None else positions
        added = position.sinusoidal(
            places, self.width, offset=offset, base=self.base, layout=self.layout, dtype=x.dtype, device=x.device
        )
        return x + added

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base}, layout={self.layout!r}"


class LearnedPositions(nn.Module):
    """Adds a learned row for each position to x [..., L, width]; a position past the table is an error.

    `resized` gives a longer or shorter table by linear interpolation, for those who ask for it.

    Args:
        length: the number of positions.
        width: the width of x.

    >>> add, x = LearnedPositions(8, 4), torch.randn(2, 6, 4)
    >>> torch.equal(add(x)[:, 5:], add(x[:, 5:], offset=5))
    True
    >>> add.resized(16).weight.shape
    torch.Size([16, 4])

    Gehring et al., Convolutional Sequence to Sequence Learning, 2017, https://arxiv.org/abs/1705.03122.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(length, width) * 0.02)

    def forward(self, x: Tensor, *, positions: Tensor | None = None, offset: int | Tensor = 0) -> Tensor:
        _check_width("LearnedPositions", x, self.weight.shape[1])
        _check_places("LearnedPositions", x, positions)
        if positions is None and not isinstance(offset, Tensor):
            if offset < 0 or offset + x.shape[-2] > len(self.weight):
                self._refuse(f"{offset} to {offset + x.shape[-2] - 1}")
            return x + self.weight[offset : offset + x.shape[-2]]
        places = torch.arange(x.shape[-2], device=x.device) if positions is None else positions
        places = places + (offset[..., None] if isinstance(offset, Tensor) else offset)
        try:
            return x + nn.functional.embedding(places, self.weight)
        except IndexError:
            self._refuse(f"{places.min()} to {places.max()}")

    def resized(self, length: int) -> "LearnedPositions":
        rows = self.weight.detach().T[None]  # [1, width, length]
        other = LearnedPositions(0, self.weight.shape[1])
        size = {"size": length, "mode": "linear", "align_corners": True}
        other.weight = nn.Parameter(nn.functional.interpolate(rows, **size)[0].T.contiguous())
        return other

    def _refuse(self, got: str) -> None:
        last = len(self.weight) - 1
        raise ValueError(f"LearnedPositions: expected positions from 0 to {last} (or a table `resized`), got {got}")

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class DistanceBias(nn.Module):
    """A bias of scores by distance: `distance_bias(Lq, Lk)` [1, H, Lq + Lk - 1] is what `attention` takes under that
    name; calling the module gives the dense bias [1, H, Lq, Lk].

    The last query stands at the last key, so one query after a cache needs no offset; `offset` [B] is for samples of
    which it stands so many keys before the last.

    >>> bias = T5Bias(4)
    >>> torch.equal(bias(6, 6)[:, :, 5:], bias(1, 6))
    True
    """

    def distance_bias(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        raise NotImplementedError

    def forward(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        return position.expand(self.distance_bias(queries, keys, offset=offset), queries, keys)


class AlibiBias(DistanceBias):
    """ALiBi: -slope |d|, in float32 whatever the type of the module.

    Args:
        heads: the number of query heads.
        learned: whether the slopes are a parameter.

    >>> AlibiBias(8)(2, 2)[0, 0].tolist()
    [[0.0, -0.5], [-0.5, 0.0]]

    Press et al., Train Short, Test Long, 2021, https://arxiv.org/abs/2108.12409.
    """

    def __init__(self, heads: int, *, learned: bool = False) -> None:
        super().__init__()
        self.heads = heads
        slopes = position.alibi_slopes(heads)
        if learned:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def distance_bias(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        return position.alibi(self.slopes.float(), queries, keys, offset=offset)

    def _apply(self, *args: object, **kwargs: object) -> "AlibiBias":
        """A cast of the module moves fixed slopes and does not round them, and memory that is new gets them."""
        super()._apply(*args, **kwargs)
        if not isinstance(self.slopes, nn.Parameter):
            with self.slopes.device:
                self.slopes = position.alibi_slopes(self.heads)
        return self


class T5Bias(DistanceBias):
    """T5's learned bias of buckets of distances, for self-attention.

    Args:
        heads: the number of query heads.
        buckets, max_distance, bidirectional: as in `position.t5_buckets`.

    >>> T5Bias(4, bidirectional=False)(3, 3).shape
    torch.Size([1, 4, 3, 3])

    Raffel et al., Exploring the Limits of Transfer Learning (T5), 2019, https://arxiv.org/abs/1910.10683.
    """

    def __init__(self, heads: int, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(buckets, heads) * 0.02)
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def distance_bias(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        options = {"bidirectional": self.bidirectional, "max_distance": self.max_distance, "offset": offset}
        return position.t5(self.table, queries, keys, **options)


class KerpleBias(DistanceBias):
    """KERPLE's learned kernels: "log", -r1 log(1 + r2 |d|), or "power", -r1 |d|^r2; in float32 where the module
    is of a half type, which many such numbers are beyond.

    Args:
        heads: the number of query heads.
        kind: "log" or "power".

    >>> KerpleBias(4)(1, 3).shape
    torch.Size([1, 4, 1, 3])

    Chi et al., KERPLE, 2022, https://arxiv.org/abs/2205.09921.
    """

    def __init__(self, heads: int, kind: str = "log") -> None:
        super().__init__()
        if kind not in ("log", "power"):
            raise ValueError(f"KerpleBias: expected kind log or power, got {kind!r}")
        self.kind = kind
        self.log_r1 = nn.Parameter((torch.rand(heads) * 2).clamp(min=0.01).log())
        self.r2_logit = nn.Parameter(torch.rand(heads).clamp(0.01, 0.99).logit())

    def distance_bias(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        wide = torch.promote_types(self.log_r1.dtype, torch.float32)
        r1, r2 = self.log_r1.to(wide).exp(), self.r2_logit.to(wide)
        if self.kind == "log":  # r2 > 0
            return position.kerple_log(r1, r2.exp(), queries, keys, offset=offset)
        return position.kerple_power(r1, 2 * r2.sigmoid(), queries, keys, offset=offset)


class ClippedBias(DistanceBias):
    """A learned bias for each distance up to `reach`; those beyond share the last.

    Args:
        heads: the number of query heads.
        reach: the largest distance, to either side, with a bias of its own.

    >>> ClippedBias(4, reach=2)(1, 5).shape
    torch.Size([1, 4, 1, 5])

    Shaw et al., Self-Attention with Relative Position Representations, 2018, https://arxiv.org/abs/1803.02155.
    """

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * reach + 1, heads) * 0.02)

    def distance_bias(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> Tensor:
        return position.clipped(self.table, queries, keys, offset=offset)


class ShawPositions(nn.Module):
    """Shaw's learned rows for each distance up to `reach`, added to keys and, unless told otherwise, to values: options
    of `attention` for a number of queries and keys. All heads share them.

    Args:
        width: D, and Dv too where there are rows for values.
        reach: the largest distance, to either side, with a row of its own.
        values: whether there are rows for values.

    >>> from attention_ops import attention
    >>> shaw, x = ShawPositions(8, reach=3), torch.randn(1, 2, 6, 8)
    >>> whole = attention(x, x, x, mask="causal", **shaw(6, 6))
    >>> last = attention(x[:, :, 5:], x, x, mask="causal", **shaw(1, 6))
    >>> torch.allclose(last, whole[:, :, 5:], atol=1e-6)
    True

    Shaw et al., Self-Attention with Relative Position Representations, 2018, https://arxiv.org/abs/1803.02155.
    """

    def __init__(self, width: int, reach: int, *, values: bool = True) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.randn(2 * reach + 1, width) * width**-0.5)
        self.value = nn.Parameter(torch.randn(2 * reach + 1, width) * width**-0.5) if values else None

    def forward(self, queries: int, keys: int, *, offset: int | Tensor = 0) -> dict[str, Tensor]:
        tables = {"relative_key": self.key, "relative_value": self.value}
        given = {name: table for name, table in tables.items() if table is not None}
        return {name: position.relative_rows(table, queries, keys, offset=offset) for name, table in given.items()}


class TransformerXLPositions(nn.Module):
    """Transformer-XL's positions: sinusoids of the distance, projected for each head, and two biases of queries.

    Takes a query [B, H, Lq, D] and the number of keys, memory of earlier segments included; gives a pair, the query to
    use and options of `attention`.

    Args:
        heads: the number of query heads.
        width: D.

    >>> from attention_ops import attention
    >>> places, x = TransformerXLPositions(2, 8), torch.randn(1, 2, 6, 8)
    >>> query, options = places(x, 6)
    >>> whole = attention(query, x, x, mask="causal", **options)
    >>> query, options = places(x[:, :, 4:], 6)
    >>> last = attention(query, x, x, mask="causal", **options)
    >>> torch.allclose(last, whole[:, :, 4:], atol=1e-6)
    True

    Dai et al., Transformer-XL, 2019, https://arxiv.org/abs/1901.02860.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(heads * width, heads * width, bias=False)
        self.content = nn.Parameter(torch.randn(heads, width) * 0.02)
        self.place = nn.Parameter(torch.randn(heads, width) * 0.02)

    def forward(
        self, query: Tensor, keys: int, *, offset: int | Tensor = 0, scale: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        _check_width("TransformerXLPositions", query, self.content.shape[1])
        if query.dim() < 3 or query.shape[-3] != self.heads:
            wanted = f"[..., {self.heads}, L, {self.content.shape[1]}]"
            raise ValueError(f"TransformerXLPositions: expected query {wanted}, got {list(query.shape)}")
        behind = -position.distances(query.shape[-2], keys, offset=offset, device=query.device)
        weight = self.project.weight
        waves = position.sinusoidal(behind, weight.shape[1], layout="half", dtype=weight.dtype)
        rows = self.project(waves).unflatten(-1, (self.heads, -1)).movedim(-2, -3)  # [..., H, Lq + Lk - 1, D]
        relative_key, distance_bias = position.transformer_xl(rows, self.content, self.place, scale=scale)
        return query + self.content[:, None], {"relative_key": relative_key, "distance_bias": distance_bias}


class WindowBias(nn.Module):
    """Swin's learned bias [1, H, h w, h w] of the cells of a window.

    Args:
        heads: the number of query heads.
        height, width: cells of the window.

    >>> WindowBias(4, 2, 3)().shape
    torch.Size([1, 4, 6, 6])

    Liu et al., Swin Transformer, 2021, https://arxiv.org/abs/2103.14030.
    """

    def __init__(self, heads: int, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.table = nn.Parameter(torch.randn((2 * height - 1) * (2 * width - 1), heads) * 0.02)

    def forward(self) -> Tensor:
        return position.window(self.table, self.height, self.width)


def _check_width(operator: str, x: Tensor, width: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{operator}: expected x a Tensor, got {type(x).__name__}")
    if x.dim() < 2 or x.shape[-1] != width:
        raise ValueError(f"{operator}: expected x [..., L, {width}], got {list(x.shape)}")


def _check_places(operator: str, x: Tensor, positions: Tensor | None) -> None:
    if positions is not None and not isinstance(positions, Tensor):
        raise TypeError(f"{operator}: expected positions a Tensor, got {type(positions).__name__}")
    if positions is not None and positions.shape[-1:] != x.shape[-2:-1]:
        raise ValueError(f"{operator}: expected positions [..., {x.shape[-2]}] as in x, got {list(positions.shape)}")
