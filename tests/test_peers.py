"""Positions as other libraries compute them, in their own code, where they are installed."""

import pytest
import torch
from torch import Tensor

from attention_ops import attention, position

LENGTH, HEADS, WIDTH = 9, 2, 8
NOT_INSTALLED = {"reason": "transformers is not installed"}


def heads_of(x: Tensor) -> Tensor:
    """[B, L, H D] -> [B, H, L, D]"""
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def self_attention(kind: str, **more: int) -> tuple[torch.nn.Module, Tensor, Tensor | None]:
    """A layer of Wav2Vec2-BERT with one kind of positions, its input, and what it wants beside that."""
    modeling = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert", **NOT_INSTALLED)
    config = modeling.Wav2Vec2BertConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        position_embeddings_type=kind,
        attention_dropout=0.0,
        **more,
    )
    config._attn_implementation = "eager"
    layer, x = modeling.Wav2Vec2BertSelfAttention(config).double(), torch.randn(2, LENGTH, HEADS * WIDTH).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    places = modeling.Wav2Vec2BertRelPositionalEmbedding(config)(x) if kind == "relative" else None
    return layer, x, places


def projected(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    return [heads_of(linear(x)) for linear in (layer.linear_q, layer.linear_k, layer.linear_v)]


def test_transformer_xl_as_in_transformers():
    layer, x, places = self_attention("relative")
    theirs, _ = layer(x, relative_position_embeddings=places)
    query, key, value = projected(layer, x)
    waves = position.sinusoidal(-position.distances(LENGTH, LENGTH), HEADS * WIDTH, dtype=torch.float64)
    rows = layer.linear_pos(waves).unflatten(-1, (HEADS, WIDTH)).movedim(-2, 0)
    relative_key, distance_bias = position.transformer_xl(rows, layer.pos_bias_u, layer.pos_bias_v)
    options = {"relative_key": relative_key, "distance_bias": distance_bias}
    out = attention(query + layer.pos_bias_u[:, None], key, value, **options)
    ours = layer.linear_out(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)  # their waves are float32
    assert_same_gradients(ours, theirs, [layer.pos_bias_u, layer.pos_bias_v, layer.linear_pos.weight])


def test_shaw_as_in_transformers():
    reach = 3
    layer, x, _ = self_attention(
        "relative_key", left_max_position_embeddings=reach, right_max_position_embeddings=reach
    )
    theirs, _ = layer(x)
    relative_key = position.relative_rows(layer.distance_embedding.weight, LENGTH, LENGTH)
    out = attention(*projected(layer, x), relative_key=relative_key)
    ours = layer.linear_out(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, theirs)
    assert_same_gradients(ours, theirs, [layer.distance_embedding.weight, layer.linear_q.weight])


def assert_same_gradients(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9)])
def test_biases_as_in_x_transformers(queries, keys):
    peers = pytest.importorskip("x_transformers.x_transformers", reason="x-transformers is not installed")
    alibi = peers.AlibiPositionalBias(heads=6, total_heads=6)(queries, keys)
    ours = position.alibi(position.alibi_slopes(6), queries, keys)
    torch.testing.assert_close(position.expand(ours, queries, keys)[0], alibi)
    for causal in (False, True):
        peer = peers.RelativePositionBias(1.0, causal=causal, num_buckets=8, max_distance=6, heads=6)
        table = peer.relative_attention_bias.weight
        ours = position.t5(table, queries, keys, bidirectional=not causal, max_distance=6)
        torch.testing.assert_close(position.expand(ours, queries, keys)[0], peer(queries, keys))
