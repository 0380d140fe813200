"""torch.func: vmap in both of its forms, gradients of samples, randomness."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, vjp, vmap

import attention_ops
from attention_ops import masks


def inputs(*leading: int) -> list[Tensor]:
    return [torch.randn(*leading, *size, dtype=torch.float64) for size in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3))]


def loop(function, dims: tuple, *args: Tensor) -> Tensor:
    count = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    return torch.stack(
        [function(*(a if d is None else a.select(d, n) for a, d in zip(args, dims, strict=True))) for n in range(count)]
    )


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (2, 0, 0)], ids=str)
def test_vmap_equals_a_loop(dims):
    given = [t[0] if d is None else t.movedim(0, d) for t, d in zip(inputs(3), dims, strict=True)]

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention_ops.attention(query, key, value, mask="causal", softcap=2.0)

    torch.testing.assert_close(vmap(function, dims)(*given), loop(function, dims, *given))


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)], ids=str)
def test_vmap_over_mask_data(dims):
    query, key, value = inputs()
    lengths = torch.tensor([[7, 2], [1, 0], [3, 6]])
    visible = torch.rand(3, 2, 1, 5, 7) < 0.6
    given = [t[0] if d is None else t for t, d in zip((lengths, visible), dims, strict=True)]

    def function(length: Tensor, seen: Tensor) -> Tensor:
        return attention_ops.attention(query, key, value, mask=masks.padding(length) | masks.dense(seen))

    torch.testing.assert_close(vmap(function, dims)(*given), loop(function, dims, *given))


def test_vmap_over_bias_and_sinks():
    query, key, value = inputs()
    bias, sinks = torch.randn(3, 1, 4, 5, 7, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)

    def function(one_bias: Tensor, one_sinks: Tensor) -> Tensor:
        return attention_ops.attention(query, key, value, bias=one_bias, sinks=one_sinks)

    torch.testing.assert_close(vmap(function)(bias, sinks), loop(function, (0, 0), bias, sinks))


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
def test_vmap_of_weights(name):
    query, key, _ = inputs(3)

    def function(a: Tensor, b: Tensor) -> Tensor:
        result = getattr(attention_ops, name)(a, b, mask="causal")
        return result if isinstance(result, Tensor) else torch.cat([s.flatten() for s in result])

    torch.testing.assert_close(vmap(function)(query, key), loop(function, (0, 0), query, key))


def test_nested_vmap():
    given = inputs(2, 3)
    nested = vmap(vmap(attention_ops.attention))(*given)
    flat = vmap(attention_ops.attention)(*(t.flatten(0, 1) for t in given))
    torch.testing.assert_close(nested, flat.unflatten(0, (2, 3)))


def test_gradients_of_samples_equal_a_loop():
    project = torch.nn.Linear(8, 24, dtype=torch.float64)
    parameters = dict(project.named_parameters())
    x = torch.randn(5, 6, 8, dtype=torch.float64)

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        parts = functional_call(project, weights, sample).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)
        return attention_ops.attention(*parts, mask="causal").square().sum()

    ours = vmap(grad(loss), (None, 0))(parameters, x)
    for name in parameters:
        torch.testing.assert_close(ours[name], torch.stack([grad(loss)(parameters, s)[name] for s in x]))


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
def test_gradients_of_samples_of_weights(name):
    query, key, _ = inputs(3)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        result = getattr(attention_ops, name)(a, b, mask="causal")
        return sum(r.square().sum() for r in ([result] if isinstance(result, Tensor) else result))

    torch.testing.assert_close(vmap(grad(loss))(query, key), loop(grad(loss), (0, 0), query, key))


def test_randomness_of_vmap():
    query, key, value = inputs(3)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return attention_ops.attention(a, b, c, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="random"):
        vmap(function)(query, key, value)
    torch.manual_seed(3)
    alone = function(query[1], key[1], value[1])
    torch.manual_seed(3)
    same = vmap(function, randomness="same")(query, key, value)
    torch.testing.assert_close(same[1], alone)
    twins = [t[:1].expand(3, *t.shape[1:]) for t in (query, key, value)]
    different = vmap(function, randomness="different")(*twins)
    assert not torch.equal(different[0], different[1])
    same = vmap(function, randomness="same")(*twins)
    assert torch.equal(same[0], same[1])


def test_the_older_vmap():
    leaves = [t.requires_grad_() for t in inputs()]
    out, lse = attention_ops.attention(*leaves, mask="causal", return_lse=True)
    cotangents = torch.randn(4, *out.shape, dtype=torch.float64), torch.randn(4, *lse.shape, dtype=torch.float64)
    batched = torch.autograd.grad((out, lse), leaves, cotangents, is_grads_batched=True, retain_graph=True)
    for n in range(4):
        one = torch.autograd.grad((out, lse), leaves, [c[n] for c in cotangents], retain_graph=True)
        for a, b in zip(batched, one, strict=True):
            torch.testing.assert_close(a[n], b)


def test_vjp():
    given = inputs()
    out, pull = vjp(attention_ops.attention, *given)
    leaves = [t.clone().requires_grad_() for t in given]
    wanted = torch.autograd.grad(attention_ops.attention(*leaves), leaves, torch.ones_like(out))
    for a, b in zip(pull(torch.ones_like(out)), wanted, strict=True):
        assert torch.equal(a, b)
