"""The oracle itself, against torch and against hand-made numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from attention_ops import masks, reference


def double(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["none", "causal", "bias", "dense"])
def test_agrees_with_torch(kind):
    query, key, value, bias = double(2, 4, 5, 8), double(2, 2, 5, 8), double(2, 2, 5, 3), double(2, 4, 5, 5)
    kept = torch.rand(2, 1, 5, 5) < 0.7
    kept[..., 0] = True
    ours = {"none": {}, "causal": {"mask": "causal"}, "bias": {"bias": bias}, "dense": {"mask": kept}}[kind]
    theirs = {"none": {}, "causal": {"is_causal": True}, "bias": {"attn_mask": bias}, "dense": {"attn_mask": kept}}
    out = reference.attention(query, key, value, **ours)
    wanted = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **theirs[kind])
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    leaves = (query, key, value) + ((bias,) if kind == "bias" else ())
    torch.testing.assert_close(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(wanted, leaves, grad))


def test_lse_with_softcap_and_sinks_by_hand():
    query, key, value = torch.tensor([[[[2.0]]]]), torch.tensor([[[[1.0], [3.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    out, lse = reference.attention(
        query, key, value, scale=0.5, softcap=2.0, sinks=torch.tensor([0.1]), return_lse=True
    )
    scores = [2 * math.tanh(0.5), 2 * math.tanh(1.5)]
    total = math.exp(scores[0]) + math.exp(scores[1]) + math.exp(0.1)
    assert lse.item() == pytest.approx(math.log(total))
    assert out.item() == pytest.approx(math.exp(scores[0]) / total)


def test_is_differentiable_twice_and_forwards():
    tensors = (double(1, 2, 2, 3), double(1, 1, 3, 3), double(1, 1, 3, 2), double(1, 1, 2, 3), double(2))

    def function(query, key, value, bias, sinks):
        return reference.attention(
            query, key, value, bias=bias, sinks=sinks, mask="causal", softcap=2.0, return_lse=True
        )

    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_summaries_by_hand():
    column_sum, entropy, maximum = reference.attention_summaries(
        torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), mask=masks.causal()
    )
    assert column_sum.tolist() == [[[1.5, 0.5]]]
    assert entropy.tolist() == [[[0.0, pytest.approx(math.log(2))]]]
    assert maximum.tolist() == [[[1.0, 0.5]]]


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, wanted):
    words = reference.philox(*(torch.tensor(word) for word in (*counter, *key)))
    assert " ".join(f"{word.item():08x}" for word in words) == wanted
