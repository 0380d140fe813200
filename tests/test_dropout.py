"""Dropout: the mask against Philox in Python, its rate, its use in values and gradients, and its draw."""

import math

import pytest
import torch
from compare import assert_exact

import attention_ops
from attention_ops import reference

SEEDS = [0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1]


@pytest.mark.every_isa
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "size", [(2, 3, 5, 1), (1, 2, 33, 7), (2, 1, 4, 64), (3, 2, 7, 131), (1, 1, 0, 8), (1, 1, 8, 0)]
)
def test_mask_is_that_of_the_formula(size, seed):
    for p in (0.0, 1e-5, 0.1, 0.5, 0.999, 1.0):
        seeds = torch.tensor([seed])
        assert torch.equal(attention_ops.dropout_mask(seeds, *size, p), reference.dropout_mask(seeds, *size, p))


@pytest.mark.parametrize("p", [0.1, 0.7])
def test_mask_with_a_seed_and_a_number_for_each_row(p):
    seeds = torch.tensor([[5, 0], [5, 7], [2**40, 2**33 + 1]])
    kept = attention_ops.dropout_mask(seeds, 3, 2, 9, 21, p)
    assert torch.equal(kept, reference.dropout_mask(seeds, 3, 2, 9, 21, p))
    alone = attention_ops.dropout_mask(torch.tensor([5]), 8, 2, 9, 21, p)
    assert torch.equal(kept[:2], alone[[0, 7]])


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["", "causal", "sliding_window(9, 3) & dilated(2)"])
def test_forward_uses_exactly_this_mask(mask, dtype):
    """With one-hot values the output shows the weights, zero exactly where they are dropped or masked."""
    query, seed = torch.zeros(2, 3, 70, 4, dtype=dtype), torch.tensor([11])
    identity = torch.eye(70, dtype=dtype).expand(2, 3, 70, 70)
    out = attention_ops.attention(query, query, identity, mask=mask, dropout_p=0.3, seed=seed)
    visible = attention_ops.attention_weights(query, query, mask=mask) > 0
    assert torch.equal(out != 0, visible & attention_ops.dropout_mask(seed, 2, 3, 70, 70, 0.3))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("p", [2.0**-16, 0.3, 1 - 2.0**-16])
def test_a_million_places_are_kept_as_the_formula_says(p, dtype):
    """Some sixteen of them have just the 16 bits of the threshold, and as many those below it."""
    length, seed = 1024, torch.tensor([2**40 + 17])
    query = torch.zeros(1, 1, length, 4, dtype=dtype)
    out = attention_ops.attention(query, query, torch.eye(length, dtype=dtype)[None, None], dropout_p=p, seed=seed)
    assert torch.equal(out != 0, attention_ops.dropout_mask(seed, 1, 1, length, length, p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_backward_uses_the_same_mask_and_factor(p):
    query, key, value = (torch.randn(2, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seed, grad = torch.tensor([23]), torch.randn(2, 2, 40, 8, dtype=torch.float64)
    ours = attention_ops.attention(query, key, value, dropout_p=p, seed=seed)
    exact = reference.attention(query, key, value, dropout_p=p, seed=seed)
    assert_exact(ours, exact)
    leaves = (query, key, value)
    for a, b in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(exact, leaves, grad), strict=True):
        assert_exact(a, b)


def test_dropping_all_gives_zeros():
    query = torch.randn(1, 2, 9, 8, requires_grad=True)
    out, lse = attention_ops.attention(query, query, query, dropout_p=1.0, return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isfinite().all()
    out.sum().backward()
    assert torch.equal(query.grad, torch.zeros_like(query))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_rate(p):
    """Within three standard deviations over 10^5 places, in all and along each axis."""
    kept = attention_ops.dropout_mask(torch.tensor([77]), 4, 5, 100, 100, p).float()
    sigma = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(1 - kept.mean().item() - p) < 3 * sigma + 1 / 65536
    for dim in range(4):
        others = [d for d in range(4) if d != dim]
        rates = 1 - kept.mean(others)
        assert (rates - p).abs().max() < 5 * sigma * math.sqrt(kept.shape[dim])


def test_places_are_independent():
    kept = attention_ops.dropout_mask(torch.tensor([3]), 2, 2, 200, 200, 0.5).double() - 0.5
    for shifted in (kept.roll(1, -1), kept.roll(1, -2), kept.roll(8, -1), kept.roll(1, 0), kept.roll(1, 1)):
        assert abs((kept * shifted).mean().item()) < 4 * 0.25 / math.sqrt(kept.numel())


def test_seed_is_drawn_from_torch():
    query = torch.randn(1, 1, 64, 8)

    def call(junk: int) -> torch.Tensor:
        torch.manual_seed(9)
        held = [torch.empty(n + 1) for n in range(junk)]  # other addresses
        out = attention_ops.attention(query.clone(), query, query, dropout_p=0.5)
        assert len(held) == junk
        return out

    first = call(0)
    assert torch.equal(first, call(100))
    following = attention_ops.attention(query, query, query, dropout_p=0.5)
    assert not torch.equal(first, following)


def test_without_dropout_no_random_number_is_drawn():
    query = torch.randn(1, 1, 8, 8)
    before = torch.get_rng_state()
    attention_ops.attention(query, query, query)
    attention_ops.attention(query, query, query, dropout_p=0.5, seed=torch.tensor([1]))
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_without_dimensions():
    query = torch.randn(1, 1, 8, 8)
    outs = [
        attention_ops.attention(query, query, query, dropout_p=0.5, seed=seed)
        for seed in (torch.tensor(4), torch.tensor([4]))
    ]
    assert torch.equal(*outs)


def test_weights_do_not_depend_on_dropout():
    """Returned weights are those before dropout: their rows sum to 1."""
    query = torch.randn(1, 2, 20, 8)
    sums = attention_ops.attention_weights(query, query).sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.every_isa
def test_threads_do_not_matter():
    query, seed, threads = torch.randn(2, 4, 300, 16), torch.tensor([5]), torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs.append(attention_ops.attention(query, query, query, dropout_p=0.5, seed=seed))
            outs.append(attention_ops.dropout_mask(seed, 2, 4, 300, 300, 0.5))
    finally:
        torch.set_num_threads(threads)
    for n in (2, 4):
        assert torch.equal(outs[0], outs[n])
        assert torch.equal(outs[1], outs[n + 1])
