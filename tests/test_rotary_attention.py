"""attention(rope=...): what rotating first gives, to the bit, with nothing that was rotated kept."""

import concurrent.futures
import functools

import cases
import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from attention_ops import COMPUTE_INTENSIVE_OPS, attention, attention_weights, masks, position, rotary

OPS = torch.ops.attention_ops
PADDED = position.left_padded(torch.tensor([9, 12]), 12)
TURNS = {
    "half": {},
    "interleaved": {"layout": "interleaved", "positions": PADDED},
    "part": {"rotary_dim": 6, "scaling": rotary.YaRN(2.0, 4)},
    "axes": {"frequencies": rotary.axial(8), "positions": rotary.grid(3, 4)},
}


def inputs(dtype: torch.dtype = torch.float64, **strides: str) -> list[Tensor]:
    sizes = {"query": (2, 4, 12, 8), "key": (2, 2, 12, 8), "value": (2, 2, 12, 5)}
    return [
        cases.strided(size, dtype, strides.get(name, "contiguous")).requires_grad_() for name, size in sizes.items()
    ]


def first(query: Tensor, key: Tensor, value: Tensor, turn: dict, **options: object) -> Tensor:
    return attention(rotary.rope(query, **turn), rotary.rope(key, **turn), value, **options)


def with_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors)
    torch.manual_seed(1)
    return [out.detach(), *torch.autograd.grad(out, tensors, torch.randn_like(out))]


@pytest.mark.every_isa
@pytest.mark.parametrize("strides", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", TURNS)
def test_equals_rotating_first(name, dtype, strides, device):
    turn = TURNS[name]
    tensors = [x.detach().to(device).requires_grad_() for x in inputs(dtype, query=strides, key=strides, value=strides)]
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in turn.items()}
    if "frequencies" in there:
        there["frequencies"] = there["frequencies"]._replace(inverse=there["frequencies"].inverse.to(device))
    ours = with_gradients(lambda q, k, v: attention(q, k, v, mask="causal", rope=rotary.Rope(**there)), tensors)
    wanted = with_gradients(lambda q, k, v: first(q, k, v, there, mask="causal"), tensors)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.every_isa
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_rotating_first_after_earlier_keys(dtype, layout):
    """Queries have the last positions."""
    sizes = ((2, 4, 70, 16), (2, 2, 150, 16), (2, 2, 150, 5))
    tensors = [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]
    option = rotary.Rope(layout=layout)
    ours = with_gradients(lambda *x: attention(*x, mask="causal", rope=option), tensors)
    wanted = with_gradients(
        lambda q, k, v: attention(
            rotary.rope(q, offset=80, layout=layout), rotary.rope(k, layout=layout), v, mask="causal"
        ),
        tensors,
    )
    assert all(map(torch.equal, ours, wanted))


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_rotating_first_at_length(dtype):
    """Where rows are packed, too: heads of one row lie next to each other, a multiple of 1 KiB apart."""
    tensors = [x.transpose(1, 2).detach().requires_grad_() for x in torch.randn(3, 1, 1100, 8, 64, dtype=dtype)]
    ours = with_gradients(lambda q, k, v: attention(q, k, v, mask="causal", rope=rotary.Rope()), tensors)
    wanted = with_gradients(lambda q, k, v: first(q, k, v, {}, mask="causal"), tensors)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs)
    apart = [x.detach().contiguous().requires_grad_() for x in tensors]
    for mine, theirs in zip(
        with_gradients(lambda q, k, v: attention(q, k, v, mask="causal"), tensors),
        with_gradients(lambda q, k, v: attention(q, k, v, mask="causal"), apart),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", TURNS)
def test_derivatives(name):
    option = rotary.Rope(**TURNS[name])
    bias = torch.randn(1, 4, 12, 12, dtype=torch.float64, requires_grad=True)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, bias=bias, mask="causal", rope=option, return_lse=True)

    given = (*inputs(), bias)
    forward = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, given, check_batched_grad=True, fast_mode=True, **forward)
    second = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "check_batched_grad": True}
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True, **second)


def test_nothing_that_was_rotated_is_kept():
    query, key, value = (torch.randn(1, 2, 300, 64, requires_grad=True) for _ in range(3))
    kept = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(query, key, value, rope=rotary.Rope())
    table, lse = 300 * 64 * 4, 2 * 300 * 4
    assert sum(kept.values()) == sum(x.nbytes for x in (query, key, value, out)) + table + lse
    out.sum().backward()


def test_several_threads_at_once():
    """Scratch memory is theirs alone."""
    tensors = [torch.randn(3, 1, 2, n, 64).requires_grad_() for n in (700, 500, 900)]

    def call(x: Tensor) -> list[Tensor]:
        out = attention(*x.unbind(0), mask="causal", rope=rotary.Rope())
        return [out.detach(), *torch.autograd.grad(out.square().sum(), x)]

    wanted = [call(x) for x in tensors]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, results in enumerate(pool.map(lambda n: call(tensors[n % 3]), range(30))):
            assert all(map(torch.equal, results, wanted[n % 3]))


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)], ids=str)
def test_vmap_equals_a_loop(dims):
    """Over inputs and over positions, of gradients too."""
    query, key, value = torch.randn(3, 4, 2, 2, 5, 8, dtype=torch.float64)
    places = torch.randint(0, 50, (4, 5))

    def function(query: Tensor, places: Tensor) -> Tensor:
        return attention(query, key[0], value[0], mask="causal", rope=rotary.Rope(positions=places)).square().sum()

    for derived in (function, torch.func.grad(function)):
        given = [x[0] if d is None else x for x, d in zip((query, places), dims, strict=True)]
        ours = torch.func.vmap(derived, dims)(*given)
        wanted = [derived(*(x if d is None else x[n] for x, d in zip(given, dims, strict=True))) for n in range(4)]
        torch.testing.assert_close(ours, torch.stack(wanted))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    query, key, value = (x.detach().requires_grad_(requires_grad) for x in inputs(torch.float32))
    table = OPS.rope_table(key, rotary.frequencies(8).inverse)
    shared = (query, key, value, None, None, None, [], "causal", 0.3, 0.0, 0.0, None, table, True)
    torch.library.opcheck(OPS._rotary_attention_forward.default, shared)
    out, lse = OPS._rotary_attention_forward(*(x.detach() if isinstance(x, Tensor) else x for x in shared))
    needed = [True, True, True, False, False, False]
    torch.library.opcheck(
        OPS._rotary_attention_backward.default, (*shared, out, lse, torch.ones_like(out), None, needed)
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_without_breaks_or_recompilations(backend):
    torch._dynamo.reset()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask="causal", rope=rotary.Rope(scaling=rotary.YaRN(2.0, 16)))

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for number, (batch, length) in enumerate(((2, 33), (3, 40), (4, 65))):
        tensors = [torch.randn(batch, 5, length, 16, requires_grad=True) for _ in range(3)]
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            ours = with_gradients(compiled, tensors)
        for mine, theirs in zip(ours, with_gradients(function, tensors), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_export_with_a_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask="causal", rope=rotary.Rope())

    lengths = {2: torch.export.Dim("length", min=2, max=4096)}
    example = tuple(torch.randn(2, 3, 9, 8) for _ in range(3))
    exported = torch.export.export(Model(), example, dynamic_shapes=(lengths,) * 3, strict=True)
    for program in (exported, exported.run_decompositions()):
        given = [torch.randn(2, 3, 50, 8) for _ in range(3)]
        torch.testing.assert_close(program.module()(*given), Model()(*given))


def test_autocast():
    """Rows are rounded, then turned; angles stay as they are. Weights agree."""
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    turn = {"positions": torch.arange(30000, 30009)}
    halves = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(
            lambda *x: attention(*x, rope=rotary.Rope(**turn)),
            [x.clone().requires_grad_() for x in (query, key, value)],
        )
        eye = torch.eye(9).expand(1, 2, 9, 9)
        shown = attention(query, key, eye, rope=rotary.Rope(**turn))
        assert torch.equal(shown, attention_weights(query, key, rope=rotary.Rope(**turn)))
    wanted = with_gradients(lambda *x: first(*x, turn), [x.requires_grad_() for x in halves])
    assert ours[0].dtype == torch.bfloat16
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs.to(mine.dtype))


def test_more_leading_dimensions():
    tensors = torch.randn(3, 2, 3, 2, 5, 8, dtype=torch.float64)
    for positions in (None, torch.arange(5), torch.randint(0, 50, (2, 3, 5))):
        turn = {"positions": positions}
        assert torch.equal(attention(*tensors, rope=rotary.Rope(**turn)), first(*tensors, turn))
    assert torch.equal(attention(*tensors[:, 0, 0, 0], rope=rotary.Rope()), first(*tensors[:, 0, 0, 0], {}))


@pytest.mark.parametrize(
    "sizes", [((3, 2, 2), (2, 2), (2, 2)), ((1, 2), (2, 2), (2, 2)), ((2,), (2, 2), (3, 2, 2))], ids=str
)
def test_positions_of_samples_that_only_some_inputs_have(sizes):
    query, key, value = (torch.randn(*size, 5, 8, dtype=torch.float64) for size in sizes)
    positions = torch.randint(0, 50, (2, 5))
    leading = torch.broadcast_shapes(*(size[:-1] for size in sizes))
    whole = [x.expand(*leading, *x.shape[-3:]) for x in (query, key, value)]
    wanted = first(*whole, {"positions": positions})
    assert torch.equal(attention(query, key, value, rope=rotary.Rope(positions=positions)), wanted)
    weights = attention_weights(query, key, rope=rotary.Rope(positions=positions))
    torch.testing.assert_close(weights @ value, wanted)


def test_a_selective_checkpoint_keeps_it():
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    context = functools.partial(checkpoint.create_selective_checkpoint_contexts, COMPUTE_INTENSIVE_OPS)
    call = functools.partial(attention, rope=rotary.Rope())
    out = checkpoint.checkpoint(call, *inputs(), use_reentrant=False, context_fn=context)
    with Log():
        out.sum().backward()
    assert not [name for name in seen if "forward" in name]
    assert [name for name in seen if "_rotary_attention_backward" in name]


def test_masks_that_nobody_sees_through():
    tensors = inputs()
    mask = masks.padding(torch.tensor([0, 7]))
    ours = with_gradients(lambda *x: attention(*x, mask=mask, rope=rotary.Rope()), tensors)
    wanted = with_gradients(lambda *x: first(*x, {}, mask=mask), tensors)
    assert all(map(torch.equal, ours, wanted))
    assert not ours[0][0].any()


def test_other_refusals_name_the_argument():
    query, key, value = (x.detach() for x in inputs())
    with pytest.raises(TypeError, match="attention: expected key dtype float64 as in query, got int32"):
        attention(query, key.int(), value, rope=rotary.Rope())
    with pytest.raises(
        ValueError, match="attention_weights: expected query length of at most 5 as in key, with rope, got 12"
    ):
        attention_weights(query, key[:, :, :5], rope=rotary.Rope())


WRONG = {
    "dtype": (TypeError, lambda t: t.double(), "rope_table dtype float32, got float64"),
    "rows": (
        ValueError,
        lambda t: t[:, 1:],
        r"rope_table shape \[2 or 1, 12, 2, pairs\] with at most 8 / 2 pairs, got",
    ),
    "pairs": (ValueError, lambda t: t.repeat(1, 1, 1, 2), "rope_table shape"),
    "batch": (ValueError, lambda t: t.repeat(3, 1, 1, 1), "rope_table shape"),
    "dimensions": (ValueError, lambda t: t[0], "rope_table shape"),
    "device": (ValueError, lambda t: t.to("meta"), "rope_table device cpu as in query, got meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tables(name):
    error, change, message = WRONG[name]
    query, key, value = (x.detach() for x in inputs(torch.float32))
    table = OPS.rope_table(key, rotary.frequencies(8).inverse)
    with pytest.raises(error, match=f"attention: expected {message}"):
        OPS.attention(query, key, value, [], rope_table=change(table))


def test_the_private_operator_refuses_a_table_without_rows_for_the_queries():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 2, 8)
    table = OPS.rope_table(key, rotary.frequencies(8).inverse)
    with pytest.raises((RuntimeError, IndexError), match=r"narrow|start|row for each"):
        OPS._rotary_attention_forward(query, key, key, None, None, None, [], "", 0.3, 0.0, 0.0, None, table, False)


def test_derivatives_by_the_table_are_refused():
    query, key, value = inputs(torch.float32)
    table = OPS.rope_table(key, rotary.frequencies(8).inverse).requires_grad_()
    with pytest.raises(NotImplementedError, match="table without gradients or tangents"):
        OPS.attention(query, key, value, [], rope_table=table)
