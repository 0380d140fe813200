"""Rotary positions: `rope`, the same as an option of `attention`, frequencies and scalings."""

import dataclasses

import torch
from torch import Tensor

from .frequencies import (
    BASE,
    DynamicNTK,
    Frequencies,
    Linear,
    Llama3,
    LongRoPE,
    Scaling,
    YaRN,
    axial,
    frequencies,
    grid,
    is_number,
    scaled_frequencies,
    sections,
)

__all__ = [
    "DynamicNTK",
    "Frequencies",
    "Linear",
    "Llama3",
    "LongRoPE",
    "Rope",
    "Scaling",
    "YaRN",
    "axial",
    "frequencies",
    "grid",
    "rope",
    "sections",
]

LAYOUTS = ("half", "interleaved")
MOST = 2**53  # float64 has every integer up to here


def rope(
    x: Tensor,
    *,
    positions: Tensor | None = None,
    offset: int | Tensor = 0,
    base: float = BASE,
    layout: str = "half",
    rotary_dim: int | None = None,
    scaling: Scaling | None = None,
    frequencies: Frequencies | None = None,
) -> Tensor:
    """Rotary positions: pairs of elements turn by angles proportional to their row's position.

        t = position * inverse_frequency of the pair        (a, b) -> factor (a cos t - b sin t, b cos t + a sin t)

    Scores of two rotated rows depend on the difference of their positions alone. Angles are float64 products whatever
    the type of x, also under autocast, and every derivative is a rotation again.

    Args:
        x: [B, H, L, D], query or key; also [L, D], [H, L, D] and more leading dimensions (of a DTensor, [B, H, L, D]).
            Its type is the result's.
        positions: [L] or [B, L], integers, or float32 or float64 for places between them; 0, 1, 2, ... if None.
            Where the frequencies have axes, [axes, L] or [B, axes, L].
        offset: added to the positions: a number, or a tensor [B] with one for each sample.
        base: the inverse frequencies are base^(-2i / rotary_dim).
        layout: which elements are a pair: "half" (i and i + rotary_dim / 2) or "interleaved" (2i and 2i + 1).
        rotary_dim: how many elements of a row turn, the first ones; the others pass. D if None.
        scaling: Linear, DynamicNTK, YaRN, Llama3 or LongRoPE of `attention_ops.rotary`.
        frequencies: in place of base, rotary_dim and scaling: what `rotary.frequencies`, `rotary.axial` or
            `rotary.sections` gave.

    Returns:
        The shape and type of x, differentiable in x to any order.

    Raises:
        ValueError: for shapes and numbers that do not fit; TypeError: for types that do not.

    >>> query, key = torch.randn(2, 1, 4, 6, 64).unbind(0)
    >>> scores = rope(query) @ rope(key).mT
    >>> shifted = rope(query, offset=1000) @ rope(key, offset=1000).mT
    >>> torch.allclose(scores, shifted, atol=1e-4)
    True

    Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, https://arxiv.org/abs/2104.09864.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"rope: expected x a Tensor, got {type(x).__name__}")
    _check_layout(layout)
    positions, offset = _places(x, positions, offset, frequencies)
    inverse, factor, axes = _chosen_frequencies(x, positions, offset, base, rotary_dim, scaling, frequencies)
    if is_dtensor(x):
        if x.dim() != 4:
            raise ValueError(f"rope: expected a DTensor x with 4 dimensions [B, H, L, D], got {x.dim()}")
        table = _beside(x, torch.ops.attention_ops.rope_table(x, inverse, positions, offset, axes, factor))
        return torch.ops.attention_ops._rope(x, table, layout == "interleaved", False)
    return torch.ops.attention_ops.rope(x, inverse, positions, offset, axes, layout == "interleaved", factor)


@dataclasses.dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions as an option of `attention`, with the arguments of `rope` but `offset`.

    The result is that of rotating query and key first, but there is one table of cosines and sines for both, and what
    was rotated is not kept for the backward pass, which rotates again. Under autocast rows are rounded, then rotated.

    `positions` are those of the keys, [Lk] or [B, Lk]; the queries have the last Lq of them. So a step with a cache,
    of keys as they were before rotation, needs no offset, and a scaling by length sees the cache's. Of a cache with
    room for more, give the part that is filled, `cache[:, :, :length]`. Samples padded on the left need no positions.

    >>> from attention_ops import attention
    >>> x = torch.randn(1, 2, 6, 8)
    >>> whole, last = (attention(q, x, x, mask="causal", rope=Rope()) for q in (x, x[:, :, 5:]))
    >>> torch.allclose(last, whole[:, :, 5:], atol=1e-6)
    True
    """

    positions: Tensor | None = None
    base: float = BASE
    layout: str = "half"
    rotary_dim: int | None = None
    scaling: Scaling | None = None
    frequencies: Frequencies | None = None

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key [B, H, L, D], rotated."""
        earlier = key.shape[-2] - query.shape[-2]
        if earlier < 0:
            raise ValueError(f"Rope: expected query length of at most {key.shape[-2]}, got {query.shape[-2]}")
        positions, frequencies = self._of(key)
        turn = {"layout": self.layout, "frequencies": frequencies}
        last = {"offset": earlier} if positions is None else {"positions": positions[..., earlier:]}
        wide_query = _with_samples(positions, frequencies, query, key)
        wide_key = _with_samples(positions, frequencies, key, query)
        return rope(wide_query, **turn, **last), rope(wide_key, **turn, positions=positions)

    def options(self, query: Tensor, key: Tensor, value: Tensor) -> dict[str, object]:
        """What the operator is told: cosines and sines [B|1, Lk, 2, pairs] of the keys' positions, and the layout."""
        _check_layout(self.layout)
        positions, frequencies = self._of(key)
        inverse, factor, axes = frequencies
        key = _with_samples(positions, frequencies, key, query, value)
        table = torch.ops.attention_ops.rope_table(key, inverse, positions, 0, axes, factor)
        return {"rope_table": _beside(key, table), "interleaved": self.layout == "interleaved"}

    def _of(self, key: Tensor) -> tuple[Tensor | None, Frequencies]:
        positions, _ = _places(key, self.positions, 0, self.frequencies)
        given = (self.base, self.rotary_dim, self.scaling, self.frequencies)
        return positions, _chosen_frequencies(key, positions, 0, *given)


def _with_samples(positions: Tensor | None, frequencies: Frequencies, x: Tensor, *others: Tensor) -> Tensor:
    """x with all leading dimensions that the operator's inputs have together, where there are positions for each."""
    if positions is None or positions.dim() <= (2 if frequencies.axes else 1):
        return x
    try:
        leading = torch.broadcast_shapes(*(t.shape[:-3] for t in (x, *others)))
    except RuntimeError:  # which the operator refuses
        return x
    return x.expand(*leading, *((1,) * (3 - x.dim()) if leading else ()), *x.shape[-3:])


def is_dtensor(x: Tensor) -> bool:
    """By its name: the class is slow to import, and this is traced by compilers."""
    return type(x).__name__ == "DTensor"


def _beside(x: Tensor, table: Tensor) -> Tensor:
    """The table where x is: the same for all devices of a DTensor."""
    if not is_dtensor(x):
        return table
    from .distributed import replicated

    return replicated(table, x)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"rope: expected layout half or interleaved, got {layout!r}")


def _chosen_frequencies(
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    base: float,
    rotary_dim: int | None,
    scaling: Scaling | None,
    frequencies: Frequencies | None,
) -> Frequencies:
    for name, given, kind in (("frequencies", frequencies, Frequencies), ("scaling", scaling, Scaling)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"rope: expected {name} a rotary.{kind.__name__}, got {type(given).__name__}")
    if frequencies is not None:
        _check_frequencies(frequencies)
    else:
        width = rotary_dim if rotary_dim is not None else x.shape[-1] if x.dim() else 0
        length = _length(x, positions, offset) if scaling is not None and scaling.by_length else 0
        return scaled_frequencies("rope", width, base, scaling, length, x.device)
    if rotary_dim is not None or scaling is not None or base != BASE:
        raise ValueError("rope: expected no base, rotary_dim or scaling with frequencies, got both")
    return frequencies


def _check_frequencies(frequencies: Frequencies) -> None:
    inverse, factor, axes = frequencies
    wanted = (
        ("inverse", inverse, "a Tensor", isinstance(inverse, Tensor)),
        ("factor", factor, "a number", is_number(factor)),
        ("axes", axes, "a tuple of integers", isinstance(axes, tuple) and all(isinstance(axis, int) for axis in axes)),
    )
    for name, given, kind, fits in wanted:
        if not fits:
            raise TypeError(f"rope: expected frequencies.{name} {kind}, got {given!r}"[:200])


def _places(x: Tensor, positions: Tensor | None, offset: int | Tensor, of: object) -> tuple[Tensor | None, int]:
    """Positions and a number to add; offsets of samples are added here."""
    own = 2 if isinstance(of, Frequencies) and of.axes else 1  # dimensions that are no batch
    if positions is not None and not isinstance(positions, Tensor):
        raise TypeError(f"rope: expected positions a Tensor, got {type(positions).__name__}")
    if positions is not None and positions.dim() < own:
        raise ValueError(f"rope: expected positions with {own} or more dimensions, got {positions.dim()}")
    if isinstance(offset, int | torch.SymInt) and not isinstance(offset, bool):
        if isinstance(offset, int) and abs(offset) > MOST:
            raise ValueError(f"rope: expected offset from -2**53 to 2**53, got {offset}")
        return positions, offset
    if not isinstance(offset, Tensor):
        raise TypeError(f"rope: expected offset an integer or a tensor of integers, got {type(offset).__name__}")
    if offset.dtype.is_floating_point or offset.dtype.is_complex or offset.dtype == torch.bool:
        raise TypeError(f"rope: expected offset an integer or a tensor of integers, got {offset.dtype}")
    if offset.dim() > 1:
        raise ValueError(f"rope: expected offset with 0 or 1 dimensions [B], got {offset.dim()}")
    if positions is None:
        positions = torch.arange(x.shape[-2], device=offset.device)
    if offset.dim() == 0:
        return _exact(positions) + offset, 0
    batch = positions.shape[-own - 1] if positions.dim() > own else 1
    if batch != 1 and len(offset) not in (1, batch):
        raise ValueError(f"rope: expected offset length {batch} as in positions, got {len(offset)}")
    return _exact(positions) + offset.reshape(-1, *(1,) * own), 0


def _exact(positions: Tensor) -> Tensor:
    """As numbers to add to; what the operator refuses is left to it."""
    refused = (torch.bool, torch.float16, torch.bfloat16)
    return positions if positions.dtype in refused or positions.dtype.is_complex else positions.double()


def _length(x: Tensor, positions: Tensor | None, offset: int) -> int | Tensor:
    """The largest position + 1."""
    if positions is None:
        return x.shape[-2] + offset
    return _exact(positions.max()) + 1 + offset if positions.numel() else 0
