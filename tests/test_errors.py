"""Errors: one call for each message, and the grammar of all.

operator: expected argument property wanted [as in other argument], got actual
"""

import re

import numpy as np
import pytest
import torch
from torch import Tensor

import attention_ops
from attention_ops import masks, visualize

DEFAULTS = {"query": (2, 4, 5, 8), "key": (2, 2, 6, 8), "value": (2, 2, 6, 3)}
GRAMMAR = re.compile(r"\w+: expected .+, got .+", re.DOTALL)


def inputs(**changes: object) -> dict[str, object]:
    """A legal call, with sizes or arguments changed."""
    made = {name: torch.randn(size) for name, size in DEFAULTS.items()}
    for name, change in changes.items():
        made[name] = torch.randn(change) if isinstance(change, tuple) else change
    return made


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


VALUE_ERRORS = {
    "query_rank": ({"query": (8,)}, "query with 2 or more dimensions"),
    "key_rank": ({"key": (8,)}, "key with 2 or more dimensions"),
    "value_rank": ({"value": (8,)}, "value with 2 or more dimensions"),
    "batch": ({"key": (3, 2, 6, 8), "value": (3, 2, 6, 3)}, "key size 2 or 1 at dimension 0 as in query, got 3"),
    "value_batch": ({"value": (3, 2, 6, 3)}, "value size 2 or 1 at dimension 0 as in query, got 3"),
    "width": ({"key": (2, 2, 6, 7)}, "key width 8 as in query, got 7"),
    "value_length": ({"value": (2, 2, 7, 3)}, "value length 6 as in key, got 7"),
    "value_heads": ({"value": (2, 4, 6, 3)}, "value heads 2 as in key, got 4"),
    "heads_3_2": ({"query": (2, 3, 5, 8)}, "key heads that divide the 3 heads of query, got 2"),
    "heads_33_2": ({"query": (2, 33, 5, 8)}, "key heads that divide the 33 heads of query, got 2"),
    "heads_4_0": ({"key": (2, 0, 6, 8), "value": (2, 0, 6, 3)}, "key heads that divide the 4 heads of query, got 0"),
    "bias_keys": ({"bias": (1, 1, 5, 7)}, "bias size 6 or 1 at Lk, got 7"),
    "bias_queries": ({"bias": (1, 1, 6, 6)}, "bias size 5 or 1 at Lq, got 6"),
    "bias_heads": ({"bias": (1, 2, 5, 6)}, "bias size 4 or 1 at H, got 2"),
    "bias_batch": ({"bias": (4, 1, 5, 6)}, "bias size 2 or 1 at B, got 4"),
    "bias_3d": ({"bias": (4, 5, 6)}, "bias with 4 dimensions, .* or .*, got 3"),
    "bias_5d": ({"bias": (1, 2, 4, 5, 6)}, "bias with at most 4 dimensions, got 5"),
    "sinks_rank": ({"sinks": (1, 4)}, "sinks with 1 dimension .*, got 2"),
    "sinks_length": ({"sinks": (2,)}, "sinks length 4 as in the heads of query, got 2"),
    "scale_nan": ({"scale": float("nan")}, "scale finite, got nan"),
    "scale_inf": ({"scale": float("-inf")}, "scale finite, got -inf"),
    "softcap_zero": ({"softcap": 0.0}, "softcap finite and above 0, got 0"),
    "softcap_negative": ({"softcap": -2.0}, "softcap finite and above 0, got -2"),
    "softcap_inf": ({"softcap": float("inf")}, "softcap finite and above 0, got inf"),
    "dropout_high": ({"dropout_p": 1.5}, "dropout_p between 0 and 1, got 1.5"),
    "dropout_low": ({"dropout_p": -0.1}, "dropout_p between 0 and 1, got -0.1"),
    "dropout_nan": ({"dropout_p": float("nan")}, "dropout_p between 0 and 1, got nan"),
    "seed_length": ({"seed": integers(1, 2), "dropout_p": 0.5}, r"seed shape \[1\] or \[2, 2\], got \[2\]"),
    "seed_unused": ({"seed": integers(1, 2)}, r"seed shape \[1\] or \[2, 2\], got \[2\]"),
    "seed_batch": ({"seed": torch.zeros(3, 2).long(), "dropout_p": 0.5}, r"seed shape .*, got \[3, 2\]"),
    "mask_kind": ({"mask": "sideways"}, "mask kind causal, .*, got 'sideways'"),
    "mask_end": ({"mask": "causal causal"}, "mask with .* after 'causal ?', got 'causal'"),
    "mask_open": ({"mask": "(causal"}, r"mask with '\)' after '\(causal', got ''"),
    "mask_hanging": ({"mask": "causal &"}, "mask kind .*, got ''"),
    "mask_word": ({"mask": "causal(sideways)"}, "mask causal with .* lower_right or upper_left, got 'sideways'"),
    "mask_number": ({"mask": "dilated(x)"}, "mask dilated with step an integer >= 1, got 'x'"),
    "mask_step": ({"mask": "dilated(0)"}, "mask dilated with step an integer >= 1, got '0'"),
    "mask_step_unbounded": ({"mask": "dilated(unbounded)"}, "mask dilated with step .*, got 'unbounded'"),
    "mask_few": ({"mask": "sliding_window(1)"}, r"mask sliding_window with arguments \(left, right\), got 1"),
    "mask_many": ({"mask": "dilated(1, 2)"}, r"mask dilated with arguments \(step\), got more"),
    "mask_data": ({"mask": "padding"}, "mask_data with 1 tensors as mask 'padding' takes, got 0"),
    "mask_leaves": ({"mask": " & ".join(["causal"] * 17)}, "mask with at most 16 kinds, got more"),
    "mask_nested": ({"mask": "(" * 17 + "causal" + ")" * 17}, "mask with at most 16 nested parentheses, got more"),
    "dense_3d": ({"mask": torch.ones(4, 5, 6).bool()}, r"mask with 4 dimensions, \[B, 1, Lq, Lk\] or \[1, H, Lq, Lk\]"),
    "dense_size": ({"mask": torch.ones(5, 7).bool()}, "mask size 6 or 1 at Lk, got 7"),
    "dense_rank": ({"mask": "dense", "mask_data": torch.ones(1, 1, 1, 5, 6).bool()}, "at most 4 dimensions, got 5"),
    "padding_batch": ({"mask": masks.padding(integers(1, 2, 3))}, "padding mask lengths size 2 or 1 at B, got 3"),
    "query_padding": ({"mask": masks.padding(queries=integers(1, 2, 3))}, "mask lengths size 2 or 1 at B, got 3"),
    "prefix_batch": ({"mask": masks.prefix_lm(integers(1, 2, 3))}, "prefix_lm mask lengths size 2 or 1 at B, got 3"),
    "document_square": ({"mask": masks.document(integers(*[0] * 5))}, "key length 5 as in query .*, got 6"),
    "global_square": ({"mask": masks.global_tokens(torch.ones(5).bool())}, "key length 5 as in query .*, got 6"),
    "layout_rows": ({"mask": masks.block_sparse(torch.ones(2, 3).bool(), 2)}, "layout size 3 at row blocks, got 2"),
    "layout_columns": ({"mask": masks.block_sparse(torch.ones(3, 4).bool(), 2)}, "size 3 at column blocks, got 4"),
    "distance_length": (
        {"distance_bias": torch.randn(1, 4, 9)},
        "distance_bias size 10 at Lq \\+ Lk - 1, got 9",
    ),
    "distance_heads": ({"distance_bias": torch.randn(1, 3, 10)}, "distance_bias size 4 or 1 at H, got 3"),
    "distance_2d": ({"distance_bias": torch.randn(4, 10)}, "distance_bias with 3 dimensions, .*, got 2"),
    "relative_width": ({"relative_key": torch.randn(1, 1, 10, 7)}, "relative_key size 8 at D, got 7"),
    "relative_value_width": ({"relative_value": torch.randn(10, 8)}, "relative_value size 3 at Dv, got 8"),
    "relative_5d": ({"relative_value": torch.randn(1, 1, 1, 10, 3)}, "with at most 4 dimensions, got 5"),
    "ranges_length": ({"mask": masks.ranges(integers(1), integers(1))}, "ranges mask start size 5 at Lq, got 1"),
    "ranges_2d": (
        {"mask": masks.ranges(integers(*[1] * 5)[None], integers(*[1] * 5)[None])},
        "start with 3 dimensions",
    ),
}
TYPE_ERRORS = {
    "query_type": ({n: torch.ones(s).long() for n, s in DEFAULTS.items()}, "query dtype float64, .*, got int64"),
    "query_complex": ({"query": torch.randn(2, 4, 5, 8) + 0j}, "query dtype .*, got complex64"),
    "key_type": ({"key": torch.randn(2, 2, 6, 8).half()}, "key dtype float32 as in query, got float16"),
    "value_type": ({"value": torch.randn(2, 2, 6, 3).double()}, "value dtype float32 as in query, got float64"),
    "bias_type": ({"bias": torch.randn(1, 1, 5, 6).bfloat16()}, "bias dtype float32 as in query .*, got bfloat16"),
    "distance_type": ({"distance_bias": torch.randn(1, 1, 10).double()}, "distance_bias dtype float32 .*, got float64"),
    "relative_object": ({"relative_key": [1]}, "relative_key a Tensor, got list"),
    "sinks_type": ({"sinks": torch.randn(4).double()}, "sinks dtype float32 as in query .*, got float64"),
    "seed_type": ({"seed": integers(1).int(), "dropout_p": 0.5}, "seed dtype int64, got int32"),
    "dense_type": ({"mask": torch.ones(5, 6)}, "mask dtype bool, got float32"),
    "padding_type": ({"mask": masks.padding(torch.ones(2))}, "padding mask lengths dtype int64, got float32"),
    "flags_type": ({"mask": masks.global_tokens(integers(1, 2))}, "global_tokens mask flags dtype bool, got int64"),
    "layout_type": ({"mask": masks.block_sparse(torch.ones(3, 3), 2)}, "layout dtype bool, got float32"),
    "mask_object": ({"mask": 3}, "mask a Mask, a str or a Tensor, got int"),
}


def refuses(error: type[Exception], wanted: str, function, *args, **kwargs) -> None:
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    message = str(caught.value).split("\nException raised from")[0]
    assert GRAMMAR.fullmatch(message), message
    assert re.search("expected .*" + wanted, message), message


def call(changes: dict) -> None:
    made = inputs(**changes)
    data = made.pop("mask_data", None)
    if data is None:
        attention_ops.attention(**made)
    else:
        torch.ops.attention_ops.attention(made["query"], made["key"], made["value"], [data], made["mask"])


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_values(name):
    changes, wanted = VALUE_ERRORS[name]
    refuses(ValueError, wanted, call, changes)


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_types(name):
    changes, wanted = TYPE_ERRORS[name]
    refuses(TypeError, wanted, call, changes)


def test_the_call_that_the_errors_start_from_is_legal():
    assert attention_ops.attention(**inputs()).shape == (2, 4, 5, 3)


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
def test_other_operators_name_themselves(name):
    function = getattr(attention_ops, name)
    refuses(ValueError, "key width 8 as in query, got 7", function, torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 7))
    with pytest.raises(ValueError, match=f"^{name}: "):
        function(torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 7))


@pytest.mark.parametrize(
    ("error", "index", "wanted"),
    [
        (TypeError, integers(0).int(), "dtype int64, got int32"),
        (ValueError, integers(0)[None], "with 1 dimension, got 2"),
        (ValueError, integers(0, 9), "from 0 to 3, got 9"),
        (ValueError, integers(-1, 2), "from 0 to 3, got -1"),
    ],
)
@pytest.mark.parametrize("name", ["heads", "rows"])
def test_chosen_heads_and_rows(name, error, index, wanted):
    query = torch.randn(2, 4, 4, 8)
    refuses(error, f"{name} {wanted}", attention_ops.attention_weights, query, query, **{name: index})


def test_heads_of_a_query_without_heads():
    query = torch.randn(5, 8)
    refuses(ValueError, "heads None", attention_ops.attention_weights, query, query, heads=integers(0))


@pytest.mark.parametrize(
    ("error", "args", "wanted"),
    [
        (ValueError, (integers(1, 2), 3, 1, 1, 1, 0.5), r"seed shape \[1\] or \[3, 2\], got \[2\]"),
        (TypeError, (integers(1).int(), 1, 1, 1, 1, 0.5), "seed dtype int64, got int32"),
        (ValueError, (integers(1), 1, 1, 1, 1, 2.0), "dropout_p between 0 and 1, got 2"),
        (ValueError, (integers(1), 1, 1, -3, 1, 0.5), "queries of 0 or more, got -3"),
        (ValueError, (integers(1), 1, 1, 1, 2**31, 0.5), "keys length below 2147483648, got 2147483648"),
    ],
)
def test_dropout_mask(error, args, wanted):
    refuses(error, wanted, attention_ops.dropout_mask, *args)


CONSTRUCTORS = [
    (ValueError, lambda: masks.causal("sideways"), "align 'lower_right' or 'upper_left', got 'sideways'"),
    (TypeError, lambda: masks.sliding_window(1.5), "left an integer, got float"),
    (TypeError, lambda: masks.sliding_window(0, True), "right an integer, got bool"),
    (ValueError, lambda: masks.dilated(0), "step >= 1, got 0"),
    (ValueError, lambda: masks.padding(), "lengths or queries, got neither"),
    (TypeError, lambda: masks.padding([1, 2]), "lengths a Tensor, got list"),
    (ValueError, lambda: masks.padding(torch.zeros(2, 2)), "lengths with at most 1 dimensions, got 2"),
    (ValueError, lambda: masks.block_sparse(torch.ones(1, 1), 0), "block >= 1, got 0"),
    (ValueError, lambda: masks.dense(torch.ones(1, 1, 1, 1, 1)), "mask with at most 4 dimensions, got 5"),
    (TypeError, lambda: masks.blocked(None), "mask a Tensor, got NoneType"),
    (TypeError, lambda: masks.blocked(torch.ones(2, 2)), "mask dtype bool, got torch.float32"),
    (ValueError, lambda: masks.parse("padding"), "an expression of causal, .*, got 'padding'"),
    (ValueError, lambda: visualize.heatmap(torch.ones(3)), r"weights with 2 or 3 dimensions .*, got 1"),
]


@pytest.mark.parametrize(("error", "make", "wanted"), CONSTRUCTORS)
def test_constructors(error, make, wanted):
    refuses(error, wanted, make)


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_and_eager_refuse_alike(compiled):
    function = torch.compile(attention_ops.attention, backend="eager") if compiled else attention_ops.attention
    with pytest.raises(Exception, match="key heads that divide the 3 heads of query, got 2"):
        function(**inputs(query=(2, 3, 5, 8)))


def test_the_operator_itself_refuses():
    """Callers that do not pass through Python's functions meet the same checks."""
    made = inputs(key=(2, 2, 6, 7))
    with pytest.raises(ValueError, match=r"^attention: expected key width 8 as in query, got 7"):
        torch.ops.attention_ops.attention(made["query"], made["key"], made["value"], [])


PUBLIC = ("attention", "attention_weights", "attention_summaries", "scaled_dot_product_attention")


def tensors_of(operator: str) -> dict[str, object]:
    names = ("query", "key") if operator in PUBLIC[1:3] else ("query", "key", "value")
    return dict.fromkeys(names, torch.zeros(1, 1, 2, 4))


@pytest.mark.parametrize("wrong", [None, 1, "x", [1.0]], ids=repr)
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("operator", PUBLIC)
def test_what_is_no_tensor(operator, name, wrong):
    tensors = tensors_of(operator)
    name = name if name in tensors else "key"
    tensors[name] = wrong
    with pytest.raises(TypeError, match=f"{operator}: expected {name} a Tensor, got {type(wrong).__name__}"):
        getattr(attention_ops, operator)(**tensors)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout_p_is_no_tensor(p):
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"^attention: expected dropout_p a number, got Parameter$"):
        attention_ops.attention(x, x, x, dropout_p=torch.nn.Parameter(torch.tensor(p)))


def test_a_seed_is_checked_without_dropout_too():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match=r"^attention: expected seed dtype int64, got int32"):
        attention_ops.attention(x, x, x, seed=torch.tensor([1], dtype=torch.int32))


NUMBERS = [(operator, name) for operator in PUBLIC[:3] for name in ("scale", "softcap")] + [(PUBLIC[3], "scale")]


@pytest.mark.parametrize(("operator", "name"), NUMBERS)
def test_numbers_are_no_tensors(operator, name):
    """A Tensor's value would be used, and its gradient lost."""
    with pytest.raises(TypeError, match=f"^{operator}: expected {name} a number, got Parameter$"):
        getattr(attention_ops, operator)(**tensors_of(operator), **{name: torch.nn.Parameter(torch.tensor(0.3))})


@pytest.mark.parametrize("number", [1, 0.5, np.float64(0.5), np.float32(0.5), np.int64(1)], ids=repr)
def test_numbers_of_any_kind(number):
    x = torch.randn(1, 1, 3, 4)
    wanted = attention_ops.attention(x, x, x, scale=float(number), softcap=float(number))
    assert torch.equal(attention_ops.attention(x, x, x, scale=number, softcap=number), wanted)


def test_numbers_of_compilers():
    """Sizes and floats that a graph leaves open."""

    def function(x: Tensor, softcap: float) -> Tensor:
        return attention_ops.attention(x, x, x, scale=x.shape[-2] ** -0.5, softcap=softcap)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length, softcap in ((3, 2.0), (5, 2.0), (5, 3.0)):
        x = torch.randn(1, 1, length, 4)
        torch.testing.assert_close(compiled(x, softcap), function(x, softcap))


def test_sparse_tensors():
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(TypeError, match="attention: expected key layout Strided, got Sparse"):
        attention_ops.attention(x, x.to_sparse(), x)
    with pytest.raises(TypeError, match="attention: expected query layout Strided, got Sparse"):
        attention_ops.attention(x.to_sparse(), x, x)
