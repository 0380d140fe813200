"""Sinusoids and biases by distance, each against a loop written from its paper."""

import functools
import math

import numpy as np
import pytest
import torch
from test_errors import refuses
from torch import Tensor

from attention_ops import attention, masks, position, reference

SIZES = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 6)]


def double(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_the_convention(queries, keys):
    """The distance of a query and a key, with the last query at the last key, as masks count it."""
    d = position.expand(position.distances(queries, keys), queries, keys)
    for i in range(queries):
        for j in range(keys):
            assert d[i, j] == j - (i + keys - queries)
    assert torch.equal(d, masks.Places(1, 1, queries, keys).distance)
    assert torch.equal(d <= 0, masks.causal().dense(1, 1, queries, keys)[0, 0])
    assert position.distances(queries, keys)[keys - 1] == 0


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_expand(queries, keys):
    bias = position.alibi(position.alibi_slopes(2), queries, keys)
    assert bias.shape == (1, 2, 0)
    assert position.expand(bias, queries, keys).shape == (1, 2, queries, keys)


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_the_gradient_of_a_distance_is_the_sum_of_its_diagonal(queries, keys):
    bias, grad = double(2, 3, queries + keys - 1), torch.randn(2, 3, queries, keys, dtype=torch.float64)
    (given,) = torch.autograd.grad(position.expand(bias, queries, keys), bias, grad)
    wanted = torch.zeros_like(bias)
    for i in range(queries):
        for j in range(keys):
            wanted[..., j - i + queries - 1] += grad[..., i, j]
    torch.testing.assert_close(given, wanted)
    assert torch.autograd.gradcheck(lambda b: position.expand(b, queries, keys), bias, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda b: position.expand(b, queries, keys).square(), bias)


def test_a_distance_bias_through_attention():
    query, key, value = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind(0)
    table = double(32, 4)

    def out(function) -> Tensor:
        bias = position.expand(position.t5(table, 9, 9, max_distance=12), 9, 9)
        return function(query, key, value, bias=bias, mask="causal")

    torch.testing.assert_close(out(attention), out(reference.attention))
    ours, wanted = (torch.autograd.grad(out(f).square().sum(), table)[0] for f in (attention, reference.attention))
    torch.testing.assert_close(ours, wanted)


def published_slopes(n: int) -> list[float]:
    """The recursion of the paper's code."""

    def power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + published_slopes(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 16, 20, 33, 40, 71])
def test_alibi_slopes(heads):
    slopes = position.alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(published_slopes(heads)), rtol=1e-6, atol=0)


def test_alibi_slopes_of_twelve_heads():
    wanted = [2.0**-n for n in range(1, 9)] + [0.707107, 0.353553, 0.176777, 0.088388]
    torch.testing.assert_close(position.alibi_slopes(12), torch.tensor(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_alibi(queries, keys):
    slopes, ahead = torch.rand(3), torch.rand(3)
    for other in (None, ahead):
        bias = position.expand(position.alibi(slopes, queries, keys, ahead=other), queries, keys)
        assert bias.shape == (1, 3, queries, keys)
        for h in range(3):
            for i in range(queries):
                for j in range(keys):
                    d = j - (i + keys - queries)
                    slope = slopes[h] if d <= 0 or other is None else other[h]
                    assert bias[0, h, i, j].item() == pytest.approx(-slope.item() * abs(d))


def original_bucket(d: int, bidirectional: bool, buckets: int, max_distance: int) -> int:
    """Mesh TensorFlow's function of memory minus query position, in its float32."""
    n, ret = -d, 0
    if bidirectional:
        buckets //= 2
        ret += (n < 0) * buckets
        n = abs(n)
    else:
        n = max(n, 0)
    exact = buckets // 2
    if n < exact:
        return ret + n
    log = np.log(np.float32(n) / np.float32(exact))
    large = exact + int(log / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact))
    return ret + min(large, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 32), (64, 256), (16, 100), (8, 2000)])
def test_t5_buckets_are_the_original_ones(bidirectional, buckets, max_distance):
    d = torch.arange(-2000, 2001)
    options = {"bidirectional": bidirectional, "buckets": buckets, "max_distance": max_distance}
    ours = position.t5_buckets(d, **options)
    assert ours.tolist() == [original_bucket(n, **options) for n in d.tolist()]
    # Neither does the number of elements matter, by which torch chooses between its two logarithms.
    assert [position.t5_buckets(torch.tensor(n), **options).item() for n in d.tolist()[::7]] == ours.tolist()[::7]


def test_t5_buckets_by_hand():
    past = [0, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 128, 10**6]
    wanted = [0, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15]
    assert position.t5_buckets(-torch.tensor(past)).tolist() == wanted
    assert position.t5_buckets(torch.tensor(past)).tolist() == [0] + [16 + n for n in wanted[1:]]


def test_t5_as_in_transformers():
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5", reason="transformers is not installed")
    theirs = modeling.T5Attention._relative_position_bucket
    d = torch.arange(-3000, 3001)
    for both in (True, False):
        assert torch.equal(position.t5_buckets(d, bidirectional=both), theirs(d, bidirectional=both))


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_t5_kerple_and_clipped_by_loops(queries, keys):
    table, ends, r1, r2 = torch.randn(32, 2), torch.randn(7, 2), torch.rand(2) + 0.1, torch.rand(2) + 0.1
    schemes = {
        "t5": (position.t5(table, queries, keys), lambda d, h: table[original_bucket(d, True, 32, 128), h]),
        "clipped": (position.clipped(ends, queries, keys), lambda d, h: ends[min(max(d, -3), 3) + 3, h]),
        "log": (position.kerple_log(r1, r2, queries, keys), lambda d, h: -r1[h] * math.log(1 + r2[h] * abs(d))),
        "power": (position.kerple_power(r1, r2, queries, keys), lambda d, h: -r1[h] * abs(d) ** r2[h]),
    }
    for name, (bias, by_hand) in schemes.items():
        dense = position.expand(bias, queries, keys)
        assert dense.shape == (1, 2, queries, keys)
        wanted = [[[by_hand(j - (i + keys - queries), h) for j in range(keys)] for i in range(queries)] for h in (0, 1)]
        torch.testing.assert_close(dense[0], torch.tensor(wanted), msg=name)


def test_gradients_of_the_schemes():
    size, r1, r2 = (4, 6), double(2).detach().abs() + 0.1, double(2).detach().abs() + 0.1
    inputs = {
        position.kerple_log: (r1.requires_grad_(), r2.requires_grad_()),
        position.kerple_power: (r1, r2),
        position.t5: (double(8, 2),),
        position.clipped: (double(5, 2),),
        position.alibi: (double(3),),
    }
    for scheme, tensors in inputs.items():
        function = functools.partial(lambda scheme, *given: scheme(*given, *size), scheme)
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(lambda *given, f=function: f(*given).square(), tensors)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 3), (4, 2)])
def test_windows(height, width):
    table = torch.randn((2 * height - 1) * (2 * width - 1), 3)
    rows, columns = torch.randn(2 * height - 1, 3), torch.randn(2 * width - 1, 3)
    joint = position.window(table, height, width)
    axial = position.axial_window(rows, columns, height, width)
    assert joint.shape == axial.shape == (1, 3, height * width, height * width)
    for i in range(height * width):
        for j in range(height * width):
            down, right = i // width - j // width + height - 1, i % width - j % width + width - 1
            assert torch.equal(joint[0, :, i, j], table[down * (2 * width - 1) + right])
            torch.testing.assert_close(axial[0, :, i, j], rows[down] + columns[right])


def test_swin_index_as_published():
    height, width = 3, 5
    coords = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
    relative[:, :, 0] += height - 1
    relative[:, :, 1] += width - 1
    relative[:, :, 0] *= 2 * width - 1
    assert torch.equal(position.window_index(height, width), relative.sum(-1))


@pytest.mark.parametrize("place", [0, 1, 5000, 2**20])
def test_sinusoids(place):
    ours = position.sinusoidal(3, 6, offset=place)
    for row in range(3):
        for i in range(3):
            angle = (place + row) * 10000 ** (-2 * i / 6)
            assert ours[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert ours[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    halves = position.sinusoidal(3, 6, offset=place, layout="half")
    assert torch.equal(halves, ours[:, [0, 2, 4, 1, 3, 5]])


def test_sinusoids_of_positions_and_offsets():
    whole = position.sinusoidal(12, 8, dtype=torch.bfloat16)
    assert whole.dtype == torch.bfloat16
    each = position.sinusoidal(4, 8, offset=torch.tensor([0, 7]), dtype=torch.bfloat16)
    assert torch.equal(each, torch.stack((whole[:4], whole[7:11])))
    chosen = torch.tensor([[3, 1], [0, 11]])
    assert torch.equal(position.sinusoidal(chosen, 8, dtype=torch.bfloat16), whole[chosen])


ERRORS = [
    (lambda: position.expand(torch.zeros(4), 2, 2), "distance_bias length 3, got 4"),
    (lambda: position.alibi_slopes(0), "heads of 1 or more, got 0"),
    (lambda: position.t5_buckets(torch.zeros(1).long(), buckets=2), "buckets that leave exact ones below 128, got 0"),
    (lambda: position.t5_buckets(torch.zeros(1).long(), max_distance=8), "exact ones below 8, got 8"),
    (lambda: position.clipped(torch.zeros(4, 1), 2, 2), "table with an odd number of rows 2 reach . 1, got 4"),
    (lambda: position.window(torch.zeros(4, 1), 2, 2), "table with 9 rows, got 4"),
    (lambda: position.axial_window(torch.zeros(4, 1), torch.zeros(3, 1), 2, 2), "rows with 3 rows, got 4"),
    (lambda: position.axial_window(torch.zeros(3, 1), torch.zeros(4, 1), 2, 2), "columns with 3 rows, got 4"),
    (lambda: position.sinusoidal(3, 5), "width even and 0 or more, got 5"),
    (lambda: position.sinusoidal(3, 4, layout="both"), "layout half or interleaved, got 'both'"),
]


@pytest.mark.parametrize(("call", "wanted"), ERRORS, ids=[wanted for _, wanted in ERRORS])
def test_errors(call, wanted):
    refuses(ValueError, wanted, call)


WRONG = {
    "lengths": (ValueError, position.distances, (-1, 3), "queries and keys of 0 or more, got -1 and 3"),
    "slopes": (ValueError, position.alibi, (torch.randn(2, 2), 3, 3), "slopes with 1 dimensions, got 2"),
    "table": (ValueError, position.t5, (torch.randn(32, 2, 2), 3, 3), "table with 2 dimensions, got 3"),
    "list": (TypeError, position.clipped, ([1.0], 3, 3), "table a Tensor, got list"),
    "rows": (ValueError, position.relative_rows, (torch.randn(3), 3, 3), "table with 2 or 3 dimensions, got 1"),
    "kernels": (ValueError, position.kerple_log, (torch.ones(3), torch.ones(2), 3, 3), "r1 and r2 shapes \\[H\\], got"),
    "places": (
        ValueError,
        position.transformer_xl,
        (torch.randn(2, 5, 4), torch.randn(2, 4), torch.randn(3, 4)),
        "place shape \\[2, 4\\] as in rows, got \\[3, 4\\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name):
    error, function, arguments, message = WRONG[name]
    refuses(error, message, function, *arguments)
