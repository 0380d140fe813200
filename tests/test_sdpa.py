"""The drop-in against torch.nn.functional.scaled_dot_product_attention."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from compare import GRADIENT, OUTPUT, assert_close
from torch import Tensor

import attention_ops
from attention_ops import scaled_dot_product_attention, sdpa

SHAPES = {
    "4d": [(2, 4, 7, 8)] * 3,
    "longer_keys": [(2, 4, 7, 8), (2, 4, 33, 8), (2, 4, 33, 8)],
    "longer_queries": [(2, 4, 33, 8), (2, 4, 7, 8), (2, 4, 7, 8)],
    "other_value_width": [(2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 3)],
    "3d": [(3, 7, 8), (3, 9, 8), (3, 9, 8)],
    "2d": [(7, 8), (9, 8), (9, 8)],
    "5d": [(3, 2, 4, 7, 8), (3, 2, 4, 9, 8), (3, 2, 4, 9, 8)],
    "6d": [(1, 3, 2, 4, 7, 8), (1, 3, 2, 4, 9, 8), (1, 3, 2, 4, 9, 8)],
    "broadcast_batch": [(2, 4, 7, 8), (1, 4, 9, 8), (1, 4, 9, 8)],
    "broadcast_heads": [(2, 4, 7, 8), (2, 1, 9, 8), (2, 1, 9, 8)],
    "broadcast_query": [(2, 1, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
    "broadcast_leading": [(3, 2, 4, 7, 8), (2, 4, 9, 8), (1, 2, 4, 9, 8)],
}
GROUPED = {
    "gqa": [(2, 6, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8)],
    "mqa": [(2, 6, 7, 8), (2, 1, 9, 8), (2, 1, 9, 8)],
    "gqa_3d": [(6, 7, 8), (2, 9, 8), (2, 9, 8)],
    "gqa_5d": [(3, 2, 4, 7, 8), (3, 2, 2, 9, 8), (3, 2, 2, 9, 8)],
    "gqa_equal": [(2, 4, 7, 8)] * 3,
}


def compare(sizes: list, dtype: torch.dtype = torch.float32, **options: object) -> None:
    """Values and gradients, against torch's function in float64, by torch's own error in this type."""

    def run(function, dtype):
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        call = {n: o.to(dtype) if isinstance(o, Tensor) and o.is_floating_point() else o for n, o in options.items()}
        if isinstance(call.get("attn_mask"), Tensor) and call["attn_mask"].is_floating_point():
            leaves.append(call["attn_mask"].detach().requires_grad_())
            call["attn_mask"] = leaves[-1]
        out = function(*leaves[:3], **call)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    tensors = [torch.randn(size).to(dtype) for size in sizes]
    with torch.no_grad():
        grad = torch.randn_like(F.scaled_dot_product_attention(*tensors, **options))
    ours, plain = run(scaled_dot_product_attention, dtype), run(F.scaled_dot_product_attention, dtype)
    exact = run(F.scaled_dot_product_attention, torch.float64)
    for n, three in enumerate(zip(ours, plain, exact, strict=True)):
        assert three[0].dtype == dtype
        rows = ours[0][..., 0].numel() / max(1, three[0][..., 0].numel()) if n == 4 else 1  # of the mask's gradient
        assert_close(*three, GRADIENT if n else OUTPUT, f"result {n}", rows)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, scale, is_causal):
    compare(SHAPES[name], is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", GROUPED)
def test_grouped(name, is_causal):
    compare(GROUPED[name], is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_types(dtype):
    compare(SHAPES["longer_keys"], dtype, is_causal=True)
    compare(SHAPES["longer_keys"], dtype, attn_mask=torch.randn(2, 1, 7, 33).to(dtype))


MASKS = [(2, 4, 7, 9), (1, 4, 7, 9), (2, 1, 7, 9), (2, 4, 1, 9), (2, 4, 7, 1), (7, 9), (7, 1), (1, 9), (4, 7, 9)]
DEEP_MASKS = [
    (1, 1, 5),
    (7, 5),
    (7, 1),
    (4, 7, 5),
    (2, 1, 1, 5),
    (3, 2, 4, 7, 5),
    (3, 1, 1, 1, 5),
    (1, 1, 4, 7, 1),
    (5,),
]


@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("size", MASKS, ids=str)
def test_masks(size, kind):
    compare([(2, 4, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)], attn_mask=make_mask(size, kind))


@pytest.mark.parametrize("kind", ["bool", "float", "infinite"])
@pytest.mark.parametrize("size", DEEP_MASKS, ids=str)
def test_masks_of_five_dimensions(size, kind):
    compare([(3, 2, 4, 7, 16), (3, 2, 4, 5, 16), (3, 2, 4, 5, 32)], attn_mask=make_mask(size, kind))


@pytest.mark.parametrize("size", [(3, 7, 9), (7, 9), (1, 7, 9), (3, 1, 9)], ids=str)
def test_masks_of_three_dimensions(size):
    compare(SHAPES["3d"], attn_mask=make_mask(size, "bool"))


def make_mask(size: tuple[int, ...], kind: str) -> Tensor:
    if kind == "bool":
        return torch.rand(size) < 0.8
    mask = torch.randn(size)
    return mask.masked_fill(torch.rand(size) < 0.2, -torch.inf) if kind == "infinite" else mask


@pytest.mark.parametrize("name", ["4d", "5d"])
def test_mask_with_groups(name):
    sizes = GROUPED["gqa" if name == "4d" else "gqa_5d"]
    heads, queries, keys = sizes[0][-3], sizes[0][-2], sizes[1][-2]
    compare(sizes, attn_mask=torch.rand(heads, queries, keys) < 0.8, enable_gqa=True)


def test_signature_is_that_of_torch():
    """Names, order and defaults. torch documents its builtin in text only, so its words are repeated here."""
    parameters = inspect.signature(scaled_dot_product_attention).parameters.values()
    ours = [(p.name, p.default) for p in parameters if p.default is not inspect.Parameter.empty]
    assert [p.name for p in parameters][:3] == ["query", "key", "value"]
    assert ours == [
        ("attn_mask", None),
        ("dropout_p", 0.0),
        ("is_causal", False),
        ("scale", None),
        ("enable_gqa", False),
    ]
    for name in ("scale", "enable_gqa"):
        assert next(p for p in parameters if p.name == name).kind is inspect.Parameter.KEYWORD_ONLY


def test_scale_and_enable_gqa_are_keywords_in_torch_too():
    query = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError):
        F.scaled_dot_product_attention(query, query, query, None, 0.0, False, 0.5)
    with pytest.raises(TypeError):
        scaled_dot_product_attention(query, query, query, None, 0.0, False, 0.5)


def test_dropout_is_drawn_from_torchs_generator():
    query = torch.randn(1, 2, 50, 8)
    torch.manual_seed(5)
    first = scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    second = scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    torch.manual_seed(5)
    assert torch.equal(first, scaled_dot_product_attention(query, query, query, dropout_p=0.5))
    assert not torch.equal(first, second)


def test_a_mask_of_five_dimensions_is_not_copied_over_queries():
    mask = torch.rand(3, 2, 1, 1, 9) < 0.8
    query, key = torch.randn(6, 4, 7, 8), torch.randn(6, 4, 9, 8)
    assert sdpa._four_dimensional_mask(mask, (3, 2, 4), query, key).shape == (6, 1, 1, 9)
    assert sdpa._four_dimensional_mask(mask[:1, :1], (3, 2, 4), query, key).shape == (1, 1, 1, 9)


@pytest.mark.parametrize("make", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("lengths", [(3, 3), (2, 5)], ids=str)
def test_causal_biases_of_torch(make, lengths):
    """Their memory holds nothing, in a shape that broadcasts against scores of one or two heads."""
    mask = getattr(importlib.import_module("torch.nn.attention.bias"), make)(*lengths)
    query, key, value = (torch.randn(2, 2, n, 8) for n in (lengths[0], lengths[1], lengths[1]))
    ours = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    with pytest.raises(ValueError, match=r"expected attn_mask of lengths \[2, 3\] .*, got \["):
        scaled_dot_product_attention(query[:, :, :2], key[:, :, :3], value[:, :, :3], attn_mask=mask)
    with pytest.raises(ValueError, match="expected attn_mask None with is_causal"):
        scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=True)
    with pytest.raises(TypeError, match="attention: expected bias a Tensor, got CausalBias"):
        attention_ops.attention(query, key, value, bias=mask)


def test_refuses_a_mask_together_with_is_causal():
    query = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="expected attn_mask None with is_causal"):
        scaled_dot_product_attention(query, query, query, torch.ones(3, 3, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        (torch.ones(3, 3).long(), "dtype bool, float32 or torch.float32 as in query, got torch.int64"),
        (torch.ones(3, 3).half(), "dtype bool, float32 or torch.float32 as in query, got torch.float16"),
        (torch.ones(3, 3).bool().to_sparse(), "layout torch.strided, got torch.sparse_coo"),
        (torch.ones(3, 3).to_sparse(), "layout torch.strided, got torch.sparse_coo"),
    ],
    ids=["integers", "halves", "sparse bool", "sparse float"],
)
def test_refuses_a_mask_by_its_own_name(mask, wanted):
    query = torch.randn(1, 1, 3, 4)
    with pytest.raises(TypeError, match=f"^{sdpa.SDPA}: expected attn_mask {wanted}$"):
        scaled_dot_product_attention(query, query, query, attn_mask=mask)


def test_autocast_takes_a_mask_of_half_type():
    query, mask = torch.randn(1, 1, 3, 4), torch.randn(3, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(query, query, query, attn_mask=mask)
    rounded = query.bfloat16()
    assert torch.equal(out, scaled_dot_product_attention(rounded, rounded, rounded, attn_mask=mask))


def test_refuses_fewer_heads_without_enable_gqa():
    with pytest.raises(ValueError, match=r"leading dimensions that broadcast with \[2, 6\] .*got \[2, 2\], \[2, 2\]"):
        scaled_dot_product_attention(*(torch.randn(size) for size in GROUPED["gqa"]))


@pytest.mark.parametrize("size", [(4, 5), (7, 6), (3, 7, 5), (2, 2, 1, 7, 5), (1, 1, 1, 1, 7, 5)], ids=str)
def test_refuses_a_mask_that_does_not_broadcast(size):
    query, key = torch.randn(3, 2, 4, 7, 16), torch.randn(3, 2, 4, 5, 16)
    wanted = r"broadcasts against \[3, 2, 4, 7, 5\], got \[" + ", ".join(map(str, size)) + r"\]"
    with pytest.raises(ValueError, match=wanted):
        scaled_dot_product_attention(query, key, key, attn_mask=torch.ones(size, dtype=torch.bool))


def test_replaces_torchs_function_in_a_module(monkeypatch):
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 3, 9, 8)
    wanted = Model()(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_ops.scaled_dot_product_attention)
    torch.testing.assert_close(Model()(x), wanted)
