"""vmap over every subset of the inputs and over every integer tensor; the slow fallback is off (see conftest.py)."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import attention_ops

N = 3
SIZES = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 3), "bias": (1, 4, 5, 7), "sinks": (4,)}
SUBSETS = [subset for n in range(1, 6) for subset in itertools.combinations(SIZES, n)]


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64)


def check(function, *mapped: Tensor) -> None:
    """vmap equals a loop."""
    results = vmap(function)(*mapped)
    apart = [function(*samples) for samples in zip(*mapped, strict=True)]
    together = results if isinstance(results, tuple) else (results,)
    for n, result in enumerate(together):
        wanted = [sample[n] if isinstance(results, tuple) else sample for sample in apart]
        torch.testing.assert_close(result, torch.stack(wanted))


def loss_of_attention(tensors: dict[str, Tensor]) -> Tensor:
    out, lse = attention_ops.attention(**tensors, mask="causal", softcap=3.0, return_lse=True)
    return out.square().sum() + lse.sin().sum()


def loss_of_weights(tensors: dict[str, Tensor]) -> Tensor:
    given = {name: x for name, x in tensors.items() if name != "value"}
    weights = attention_ops.attention_weights(**given, heads=torch.tensor([3, 1]), average=True)
    return weights.square().sum() + sum(s.square().sum() for s in attention_ops.attention_summaries(**given))


@pytest.mark.parametrize("loss", [loss_of_attention, loss_of_weights])
@pytest.mark.parametrize("subset", SUBSETS, ids="-".join)
def test_gradients_of_samples(loss, subset):
    """All gradients, where some inputs differ between samples and the others are shared."""
    shared = {name: random(*size) for name, size in SIZES.items()}
    names = [name for name in SIZES if name != "value" or loss is loss_of_attention]

    def gradients(*mapped: Tensor) -> tuple[Tensor, ...]:
        tensors = {**shared, **dict(zip(subset, mapped, strict=True))}
        wanted = grad(lambda parts: loss({**tensors, **parts}))({name: tensors[name] for name in names})
        return tuple(wanted[name] for name in names)

    check(gradients, *(random(N, *SIZES[name]) for name in subset))


@pytest.mark.parametrize("seeds", [torch.tensor([[1], [2], [3]]), torch.arange(N * 4).view(N, 2, 2)], ids=["1", "rows"])
def test_seeds(seeds):
    query, key, value = (random(*SIZES[name]) for name in ("query", "key", "value"))

    def drop(seed: Tensor, one: Tensor = query) -> Tensor:
        return attention_ops.attention(one, key, value, dropout_p=0.5, seed=seed)

    check(drop, seeds)
    check(drop, seeds, random(N, *query.shape))
    check(lambda seed: attention_ops.dropout_mask(seed, 2, 3, 4, 20, 0.5).double(), seeds)


def test_chosen_heads_and_rows():
    query, key = random(*SIZES["query"]), random(*SIZES["key"])
    heads, rows = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.tensor([[0], [2], [4]])
    weights = attention_ops.attention_weights
    check(lambda h: weights(query, key, heads=h), heads)
    check(lambda r: weights(query, key, rows=r, mask="causal"), rows)
    check(lambda h, r, q: weights(q, key, heads=h, rows=r, average=True), heads, rows, random(N, *query.shape))
