"""Heat maps: one for each head, its labels, and the numbers it shows."""

import pytest
import torch

import attention_ops
from attention_ops import visualize

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_one_map_for_each_head_with_its_weights(heads):
    query = torch.randn(1, heads, 4, 8, requires_grad=True)
    weights = attention_ops.attention_weights(query, query, mask="causal")[0]
    figure = visualize.heatmap(weights, queries=list("abcd"), keys=list("wxyz"), columns=2)
    maps = [axes for axes in figure.axes if axes.images]
    assert len(maps) == heads
    for head, axes in enumerate(maps):
        assert torch.equal(torch.from_numpy(axes.images[0].get_array().data), weights[head].detach())
        assert [label.get_text() for label in axes.get_xticklabels()] == list("wxyz")
        assert axes.get_title() == f"head {head}"


def test_is_drawn_and_saved(tmp_path):
    path = tmp_path / "weights.png"
    visualize.heatmap(torch.eye(3, dtype=torch.bfloat16)).savefig(path)
    assert path.stat().st_size > 1000
