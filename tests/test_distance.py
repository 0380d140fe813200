"""What depends on the distance alone, inside the kernels: a bias, and rows beside keys and values."""

import itertools

import cases
import pytest
import torch
from compare import assert_exact
from torch import Tensor

import attention_ops
from attention_ops import masks, nn, position, reference, rotary

KINDS = ("distance_bias", "relative_key", "relative_value")
SUBSETS = [s for n in range(1, 4) for s in itertools.combinations(KINDS, n)]
DOUBLE = {"dtype": torch.float64}


def small_tables(names: tuple[str, ...] = KINDS) -> dict[str, Tensor]:
    """For `cases.small_inputs`: Lq 3, Lk 5, widths 3 and 2, two samples of two heads."""
    sizes = {"distance_bias": (1, 2, 7), "relative_key": (2, 1, 7, 3), "relative_value": (1, 2, 7, 2)}
    return {name: torch.randn(sizes[name], **DOUBLE) for name in names}


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_every_subset_to_the_second_derivative(names):
    given, tables = cases.small_inputs(), small_tables(names)
    options = {"mask": "causal", "softcap": 1.5, "dropout_p": 0.25, "seed": torch.tensor([3]), "return_lse": True}

    def function(query: Tensor, value: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        tensors = {**given, "query": query, "value": value, **dict(zip(names, args, strict=True))}
        return attention_ops.attention(**tensors, **options)

    leaves = [x.requires_grad_() for x in (given["query"], given["value"], *tables.values())]
    checks = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, leaves, **checks)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("name", ["attention_weights", "attention_summaries"])
def test_weights_to_the_second_derivative(name):
    given, tables = cases.small_inputs(), small_tables(KINDS[:2])
    del given["value"]

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        results = getattr(attention_ops, name)(**given, **dict(zip(tables, args, strict=True)), mask="causal")
        return (results,) if isinstance(results, Tensor) else tuple(results)

    leaves = [x.requires_grad_() for x in tables.values()]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


@pytest.mark.parametrize("average", [False, True])
def test_weights_of_chosen_rows_and_heads(average, device):
    """Their distances are those of the rows, not of the order in which they are asked for."""
    given, tables = (
        {name: t.to(device) for name, t in tensors.items()}
        for tensors in (cases.small_inputs(), small_tables(KINDS[:2]))
    )
    del given["value"]
    heads, rows = torch.tensor([1, 0, 1], device=device), torch.tensor([2, 0, 2, 1], device=device)
    chosen = {"heads": heads, "rows": rows, "average": average}
    leaves = [x.requires_grad_() for x in (*given.values(), *tables.values())]
    ours, exact = (
        f(**given, **tables, mask="causal", softcap=1.5, **chosen)
        for f in (attention_ops.attention_weights, reference.attention_weights)
    )
    assert_exact(ours, exact)
    grad = torch.randn_like(exact)
    for a, b in zip(*(torch.autograd.grad(x, leaves, grad) for x in (ours, exact)), strict=True):
        assert_exact(a, b)
    none = attention_ops.attention_weights(**given, **tables, rows=rows[:0])
    assert none.shape == (2, 2, 0, 5)


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_distance_bias_equals_the_dense_one(dtype):
    query, key, value = (torch.randn(2, 4, n, 32).to(dtype) for n in (150, 290, 290))
    bias = torch.randn(1, 4, 150 + 290 - 1)
    dense = position.expand(bias, 150, 290)
    for mask in ("", "causal", "sliding_window(30, 5)"):
        ours = attention_ops.attention(query, key, value, distance_bias=bias, mask=mask)
        wanted = attention_ops.attention(query, key, value, bias=dense, mask=mask)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_decoding(queries, dtype):
    """A step with a cache takes the last rows of what the whole sequence would take."""
    x = torch.randn(2, 8, 700, 16).to(dtype)
    key = x[:, ::4].contiguous()
    alibi = position.alibi(position.alibi_slopes(8), 700, 700)
    whole = attention_ops.attention(x, key, key, distance_bias=alibi, mask="causal")
    last = position.alibi(position.alibi_slopes(8), queries, 700)
    step = attention_ops.attention(x[:, :, -queries:], key, key, distance_bias=last, mask="causal")
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    torch.testing.assert_close(step, whole[:, :, -queries:], rtol=tolerance, atol=tolerance)


def shaw_by_a_loop(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Equations 3 to 5 of the paper, for one head [L, D], with tables [2 reach + 1, D]."""
    length, reach, out = len(query), len(keys) // 2, []
    for i in range(length):
        clip = [max(-reach, min(reach, j - i)) + reach for j in range(length)]
        e = torch.stack([query[i] @ (key[j] + keys[clip[j]]) / query.shape[1] ** 0.5 for j in range(length)])
        alpha = torch.softmax(e, 0)
        out.append(sum(alpha[j] * (value[j] + values[clip[j]]) for j in range(length)))
    return torch.stack(out)


def test_shaw_against_a_loop():
    module = nn.ShawPositions(4, reach=2).double()
    query, key, value = torch.randn(3, 1, 2, 7, 4, **DOUBLE).unbind(0)
    out = attention_ops.attention(query, key, value, **module(7, 7))
    tables = module.key, module.value
    wanted = torch.stack([shaw_by_a_loop(query[0, h], key[0, h], value[0, h], *tables) for h in range(2)])[None]
    assert_exact(out, wanted)
    grads = zip(*(torch.autograd.grad(x.square().sum(), tables) for x in (out, wanted)), strict=True)
    for ours, theirs in grads:
        assert_exact(ours, theirs)


@pytest.mark.every_isa
@pytest.mark.parametrize("mask", ["", "causal", "sliding_window(70, 20)"])
def test_clipped_rows_in_a_long_problem(mask):
    """Far from the diagonal all rows of a tile are the same, which has code of its own."""
    given = {name: torch.randn(1, 2, n, 4, **DOUBLE) for name, n in (("query", 150), ("key", 210), ("value", 210))}
    shaw = {name: t.detach() for name, t in nn.ShawPositions(4, reach=3).double()(150, 210).items()}
    shaw["distance_bias"] = position.alibi(position.alibi_slopes(2).double(), 150, 210)

    def results(function) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (*given.values(), *shaw.values())]
        out = function(**dict(zip((*given, *shaw), leaves, strict=True)), mask=mask)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    for ours, exact in zip(results(attention_ops.attention), results(reference.attention), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


def test_a_sample_with_others_equals_itself_alone():
    """Bit for bit, whether the tables of the others are clipped or not."""
    query, key, value = torch.randn(3, 3, 2, 200, 8).unbind(0)
    shaw = nn.ShawPositions(8, reach=3)(200, 200, offset=torch.tensor([0, 40, 150]))
    shaw["relative_value"] = torch.cat((shaw["relative_value"][:2], torch.randn(1, 1, 399, 8)))
    out = attention_ops.attention(query, key, value, **shaw)
    for b in range(3):
        alone = {name: t[b : b + 1] for name, t in shaw.items()}
        rows = (t[b : b + 1] for t in (query, key, value))
        assert torch.equal(out[b : b + 1], attention_ops.attention(*rows, **alone))


@pytest.mark.parametrize("queries", [1, 40])
def test_two_biases_at_the_ends_of_the_range(queries, device):
    """Finite ones stay finite in sum, and minus infinity hides a place whatever the other is."""
    there = {"device": device}
    query, key = torch.randn(1, 1, queries, 8, **there), torch.randn(1, 1, 70, 8, **there)
    entries = queries + 69
    for end in (-3e38, 3e38):
        bias, by_distance = torch.full((1, 1, queries, 70), end, **there), torch.full((1, 1, entries), end, **there)
        out = attention_ops.attention(query, key, key, bias=bias, distance_bias=by_distance)
        torch.testing.assert_close(out, key.mean(2, keepdim=True).expand_as(out), rtol=1e-4, atol=1e-4)
    for other in (torch.nan, torch.inf):
        bias, by_distance = torch.zeros(1, 1, queries, 70, **there), torch.zeros(1, 1, entries, **there)
        by_distance[..., 30:] = -torch.inf
        wanted = attention_ops.attention(query, key, key, distance_bias=by_distance)
        bias[position.expand(by_distance, queries, 70) == -torch.inf] = other
        assert torch.equal(attention_ops.attention(query, key, key, bias=bias, distance_bias=by_distance), wanted)


def test_nan_that_nobody_sees_changes_no_bit(device):
    query, key, value = (torch.randn(1, 1, 150, 8) for _ in range(3))
    tables = {name: torch.randn(1, 1, 299, 8) for name in KINDS[1:]}
    results = []
    for spoil in (False, True):
        if spoil:
            for t in tables.values():
                t[:, :, 150:] = torch.nan
        leaves = [t.to(device, copy=True).requires_grad_() for t in (query, key, value, *tables.values())]
        out = attention_ops.attention(
            **dict(zip(("query", "key", "value", *tables), leaves, strict=True)), mask="causal"
        )
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)


def options_of(module: torch.nn.Module, x: Tensor) -> Tensor:
    return attention_ops.attention(x, x, x, mask="causal", rope=rotary.Rope(), **module(x.shape[2], x.shape[2]))


def test_compiled_and_exported_with_an_open_length():
    module = nn.ShawPositions(8, reach=3)
    torch._dynamo.reset()
    compiled = torch.compile(options_of, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 9, 13):
        x = torch.randn(2, 2, length, 8, requires_grad=True)
        ours, wanted = compiled(module, x), options_of(module, x)
        torch.testing.assert_close(ours, wanted)
        grads = (torch.autograd.grad(out.square().sum(), [x, *module.parameters()]) for out in (ours, wanted))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = module

        def forward(self, x: Tensor) -> Tensor:
            return options_of(self.places, x)

    model = Model()
    open_length = {"x": {2: torch.export.Dim("length", min=2)}}
    program = torch.export.export(model, (torch.randn(2, 2, 6, 8),), dynamic_shapes=open_length).module()
    x = torch.randn(2, 2, 11, 8)
    torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize("memory", [0, 3])
def test_transformer_xl_against_a_double_loop(memory):
    """The four terms (a) to (d) of the paper, of a segment of 5 tokens after `memory` earlier ones."""
    heads, width, length = 2, 4, 5
    keys = length + memory
    module = nn.TransformerXLPositions(heads, width).double()
    query, key, value = (torch.randn(1, heads, n, width, **DOUBLE) for n in (length, keys, keys))
    moved, options = module(query, keys)
    out = attention_ops.attention(moved, key, value, mask="causal", **options)
    scores = torch.full((heads, length, keys), -torch.inf, **DOUBLE)
    u, v = module.content, module.place
    for h, i, j in itertools.product(range(heads), range(length), range(keys)):
        if j > i + memory:
            continue
        wave = position.sinusoidal(torch.tensor([i + memory - j]), heads * width, layout="half", dtype=torch.float64)
        r = module.project(wave[0]).unflatten(-1, (heads, width))[h]
        a, b = query[0, h, i] @ key[0, h, j], query[0, h, i] @ r
        c, d = u[h] @ key[0, h, j], v[h] @ r
        scores[h, i, j] = (a + b + c + d) / width**0.5
    wanted = torch.softmax(scores, -1) @ value[0]
    assert_exact(out[0], wanted)
    leaves = list(module.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted)), strict=True):
        assert_exact(ours, theirs)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_distances_that_nobody_sees_may_hold_anything(value, device):
    """Under a causal mask, the distances ahead: no result and no derivative up to the second meets them."""
    given = {name: torch.randn(1, 2, 9, 4, **DOUBLE).to(device) for name in ("query", "key", "value")}
    tables = {"distance_bias": torch.randn(1, 2, 17, **DOUBLE).to(device)}
    tables |= {name: torch.randn(1, 1, 17, 4, **DOUBLE).to(device) for name in KINDS[1:]}
    spoilt = {name: t.clone() for name, t in tables.items()}
    for t in spoilt.values():
        t[:, :, 9:] = value

    def results(tables: dict[str, Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (*given.values(), *tables.values())]
        named = dict(zip((*given, *tables), leaves, strict=True))
        out = attention_ops.attention(**named, mask="causal")
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return [out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    for ours, wanted in zip(results(spoilt), results(tables), strict=True):
        torch.testing.assert_close(ours, wanted)


def test_what_masked_rows_hold_reaches_no_table(device):
    """A padded query of NaN gives nothing to the gradients of the tables."""
    tables = {name: t.to(device).requires_grad_() for name, t in small_tables().items()}
    grads = []
    for spoil in (False, True):
        torch.manual_seed(1)
        given = {name: t.to(device) for name, t in cases.small_inputs().items()}
        if spoil:
            given["query"][0, :, 2] = torch.nan
        mask = masks.padding(queries=torch.tensor([2, 3], device=device))
        out = attention_ops.attention(**given, **tables, mask=mask)
        grads.append(torch.autograd.grad(out.square().sum(), list(tables.values())))
    for ours, wanted in zip(*grads, strict=True):
        assert torch.equal(ours, wanted)


def test_vmap_over_tables():
    given, tables = cases.small_inputs(), small_tables()
    several = {name: torch.stack([t, t * 2, -t]) for name, t in tables.items()}

    def loss(tables: dict[str, Tensor]) -> Tensor:
        return attention_ops.attention(**given, **tables).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(several)
    for n in range(3):
        alone = torch.func.grad(loss)({name: t[n] for name, t in several.items()})
        for name in KINDS:
            torch.testing.assert_close(mapped[name][n], alone[name])
