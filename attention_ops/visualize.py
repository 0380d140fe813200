"""Pictures of attention: heat maps of weights."""

import typing
from collections.abc import Sequence

from torch import Tensor

if typing.TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["heatmap"]


def heatmap(
    weights: Tensor,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    titles: Sequence[str] | None = None,
    columns: int = 4,
) -> "Figure":
    """A figure with one heat map for each head: queries downwards, keys to the right, dark where the weight is large.

    `weights` is [Lq, Lk] or [H, Lq, Lk], as `attention_weights(...)[b]` gives them; `queries` and `keys` label the
    places, `titles` the heads. All maps share the scale 0 to 1. Needs matplotlib.

    >>> import torch
    >>> figure = heatmap(torch.eye(3).expand(2, 3, 3), keys=["a", "b", "c"])
    >>> [axes.get_title() for axes in figure.axes[:2]]
    ['head 0', 'head 1']
    """
    from matplotlib.figure import Figure

    if weights.dim() not in (2, 3):
        raise ValueError(f"heatmap: expected weights with 2 or 3 dimensions [H, Lq, Lk], got {weights.dim()}")
    heads = weights.detach().float().cpu().reshape(-1, *weights.shape[-2:])  # [H, Lq, Lk]
    if titles is None:
        titles = [f"head {head}" for head in range(len(heads))] if weights.dim() == 3 else [""]
    columns = max(1, min(columns, len(heads)))
    rows = -(-len(heads) // columns)
    figure = Figure(figsize=(3 * columns + 0.6, 3 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(heads) :]:
        axes.remove()
    for axes, head, title in zip(grid, heads, titles, strict=False):
        image = axes.imshow(head.numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(title)
        _label(axes.xaxis, keys, rotation=90)
        _label(axes.yaxis, queries, rotation=0)
    if len(heads):
        figure.colorbar(image, ax=list(grid[: len(heads)]), shrink=0.8)
    return figure


def _label(axis: typing.Any, labels: Sequence[str] | None, rotation: int) -> None:
    if labels is not None:
        axis.set_ticks(range(len(labels)), labels=labels, rotation=rotation, fontsize=8)
