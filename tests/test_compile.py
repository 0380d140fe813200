"""torch.compile: no breaks, no recompilations, backward included; CUDA graphs' mode; compiled autograd."""

import pytest
import torch
import torch._dynamo.testing
from backends import HAS_GPU
from torch import Tensor

import attention_ops
from attention_ops import masks


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def with_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def lengths_of(batch: int, length: int) -> Tensor:
    return torch.arange(batch) * 3 % length + 1


FUNCTIONS = {
    "plain": lambda q, k, v: attention_ops.attention(q, k, v),
    "causal": lambda q, k, v: attention_ops.attention(q, k, v, mask=masks.causal()),
    "text": lambda q, k, v: attention_ops.attention(q, k, v, mask="causal & sliding_window(9, 0)", softcap=2.0),
    "padding": lambda q, k, v: attention_ops.attention(
        q, k, v, mask=masks.causal() & masks.padding(lengths_of(q.shape[0], q.shape[2]))
    ),
    "seeded": lambda q, k, v: attention_ops.attention(q, k, v, dropout_p=0.3, seed=torch.tensor([4])),
    "sdpa": lambda q, k, v: attention_ops.scaled_dot_product_attention(q, k, v, is_causal=True),
    "weights": lambda q, k, v: attention_ops.attention_weights(q, k, mask="causal") @ v,
    "summaries": lambda q, k, v: sum(s.sum() for s in attention_ops.attention_summaries(q, k)) + v.sum(),
}


@pytest.mark.parametrize(("name", "backend"), [*((name, "aot_eager") for name in FUNCTIONS), ("padding", "inductor")])
def test_compiled_equals_eager_without_breaks_or_recompilations(name, backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(FUNCTIONS[name], backend=counter, fullgraph=True, dynamic=True)
    lengths, count = ((2, 33), (3, 40), (4, 65), (2, 130)), None
    for batch, length in lengths:
        tensors = [torch.randn(batch, 4, length, 16) for _ in range(3)]
        with torch._dynamo.config.patch(error_on_recompile=count is not None):
            ours = with_gradients(compiled, tensors)
        count = counter.frame_count if count is None else count
        for a, b in zip(ours, with_gradients(FUNCTIONS[name], tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == count


@pytest.mark.parametrize(("batch", "length"), [(1, 33), (2, 1), (1, 1)])
def test_sizes_of_one(batch, length):
    """torch compiles them anew; the graph must be whole and right all the same."""
    compiled = torch.compile(FUNCTIONS["padding"], backend="aot_eager", fullgraph=True, dynamic=True)
    for sizes in ((2, 40), (batch, length)):
        tensors = [torch.randn(sizes[0], 4, sizes[1], 16) for _ in range(3)]
        torch.testing.assert_close(with_gradients(compiled, tensors), with_gradients(FUNCTIONS["padding"], tensors))


def test_compiled_dropout_follows_manual_seed():
    compiled = torch.compile(
        lambda x: attention_ops.attention(x, x, x, dropout_p=0.5), backend="aot_eager", fullgraph=True
    )
    x, outs = torch.randn(1, 2, 20, 8), []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outs.append(compiled(x))
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(f),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "hessian": lambda f: torch.func.hessian(f),
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum()),
    "vmap of grad": lambda f: lambda x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, -x])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_compile(name):
    key, value = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)

    def loss(query: Tensor) -> Tensor:
        return attention_ops.attention(query, key, value, mask="causal").sin().sum()

    transformed = TRANSFORMS[name](loss)
    compiled = torch.compile(transformed, backend="aot_eager", fullgraph=True)
    for length in (3, 5):
        x = torch.randn(1, 2, length, 4, dtype=torch.float64)
        torch.testing.assert_close(compiled(x), transformed(x))


@pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning")
def test_reduce_overhead():
    """With CUDA graphs on a GPU; elsewhere the mode has nothing to add, and must not be in the way."""
    device = "cuda" if HAS_GPU else "cpu"
    compiled = torch.compile(rich, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):  # a graph is recorded in the second call and replayed in the third
        leaves = rich_leaves(2, 33, device)
        out = compiled(*leaves)
        ours = [out.detach().clone(), *torch.autograd.grad(out.square().sum(), leaves)]
        torch.testing.assert_close(ours, with_gradients(rich, leaves), rtol=1e-4, atol=1e-4)


def rich(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
    mask = masks.causal() & masks.padding(torch.tensor([20, 7], device=query.device))
    seed = torch.tensor([3], device=query.device)
    return attention_ops.attention(query, key, value, mask=mask, bias=bias, sinks=sinks, dropout_p=0.2, seed=seed)


def rich_leaves(batch: int, length: int, device: str = "cpu") -> list[Tensor]:
    sizes = *[(batch, 4, length, 16)] * 3, (1, 4, 1, length), (4,)
    return [torch.randn(size, device=device, requires_grad=True) for size in sizes]


# Compiled autograd looks at .grad of what is no leaf.
torchs_own = pytest.mark.filterwarnings("ignore:The .grad attribute")


@torchs_own
def test_compiled_autograd():
    """The backward is traced as one graph too; eager's own calls are in it, so that the bits are equal."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for length in (5, 9, 17):
        leaves = rich_leaves(2, length)
        wanted = with_gradients(rich, leaves)[1:]
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True, dynamic=True)):
            rich(*leaves).square().sum().backward()
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, wanted, strict=True))
    assert counter.frame_count == 1


@torchs_own
@pytest.mark.parametrize("name", ["weights", "summaries"])
def test_compiled_autograd_of_weights(name):
    for length in (5, 9, 17):
        leaves = [torch.randn(2, 4, length, 16, requires_grad=True) for _ in range(3)]
        wanted = with_gradients(FUNCTIONS[name], leaves)[1:]
        compiler = torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            FUNCTIONS[name](*leaves).square().sum().backward()
        torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


@torchs_own
def test_compiled_autograd_of_a_second_derivative():
    leaves = rich_leaves(2, 9)
    first = torch.autograd.grad(rich(*leaves).square().sum(), leaves, create_graph=True)
    penalty = sum(x.square().sum() for x in first)
    wanted = torch.autograd.grad(penalty, leaves, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        penalty.backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(wanted))


@torchs_own
def test_compiled_autograd_by_its_setting():
    leaves = rich_leaves(2, 9)
    wanted = with_gradients(rich, leaves)[1:]
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: rich(*leaves).square().sum().backward(), backend="aot_eager")()
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)
