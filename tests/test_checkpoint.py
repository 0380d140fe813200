"""Activation checkpoints of both kinds, policies of what they keep, and hooks on saved tensors: the same bits."""

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attention_ops
from attention_ops import masks


class Layer(nn.Module):
    """Attention with dropout whose seed torch draws, with everything that the backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.bias = nn.Parameter(torch.randn(1, 2, 1, 9))
        self.sinks = nn.Parameter(torch.randn(2))
        self.mask = masks.causal() & masks.padding(torch.tensor([9, 4]))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-3, -2)  # 3 x [B, H, L, D]
        options = {"mask": self.mask, "bias": self.bias, "sinks": self.sinks}
        weights = attention_ops.attention_weights(parts[0], parts[1], **options)
        summaries = attention_ops.attention_summaries(parts[0], parts[1], **options)
        out = attention_ops.attention(*parts, **options, dropout_p=0.4)
        return out.square().sum() + weights.square().sum() + sum(s.sum() for s in summaries)


def gradients(layer: Layer, x: Tensor, call) -> list[Tensor]:
    """All gradients of `call(layer, x)`, which draws the same seed each time."""
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    torch.manual_seed(5)
    call(layer, x).backward()
    return [leaf.grad for leaf in (x, *layer.parameters())]


def plainly(layer: Layer, x: Tensor) -> Tensor:
    return layer(x)


def check(call) -> None:
    layer, x = Layer(), torch.randn(2, 9, 8, requires_grad=True)
    wanted = gradients(layer, x, plainly)
    assert all(torch.equal(a, b) for a, b in zip(gradients(layer, x, call), wanted, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_with_dropout(reentrant):
    check(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))


def test_a_compiled_checkpoint():
    """Dropout drops the same when the backward computes the forward anew."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda layer, x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True
    )
    check(compiled)


def test_a_second_derivative_through_a_checkpoint():
    layer, x = Layer(), torch.randn(2, 9, 8, requires_grad=True)

    def penalty(layer: Layer, x: Tensor, call=plainly) -> Tensor:
        leaves = [x, *layer.parameters()]
        return sum(g.square().sum() for g in torch.autograd.grad(call(layer, x), leaves, create_graph=True))

    wanted = gradients(layer, x, penalty)
    kept = functools.partial(checkpoint, use_reentrant=False)
    ours = gradients(layer, x, functools.partial(penalty, call=kept))
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


class Calls(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.of = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func] = self.of.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


OPS = torch.ops.attention_ops
FORWARD = OPS._attention_forward.default


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if op in attention_ops.COMPUTE_INTENSIVE_OPS else CheckpointPolicy.PREFER_RECOMPUTE
    )


@pytest.mark.parametrize("policy", [attention_ops.COMPUTE_INTENSIVE_OPS, keep_attention], ids=["list", "function"])
def test_a_policy_keeps_attention_and_recomputes_the_rest(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(layer: Layer, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    check(call)
    with Calls() as calls:
        call(Layer(), torch.randn(2, 9, 8, requires_grad=True)).backward()
    assert {op: n for op, n in calls.of.items() if op in attention_ops.COMPUTE_INTENSIVE_OPS} == {
        FORWARD: 3,  # weights and summaries each need the forward's lse
        OPS._attention_weights.default: 1,
        OPS._attention_summaries.default: 1,
    }
    assert calls.of[torch.ops.aten.addmm.default] == 2


def test_without_a_policy_attention_is_recomputed():
    with Calls() as calls:
        checkpoint(Layer(), torch.randn(2, 9, 8, requires_grad=True), use_reentrant=False).backward()
    assert calls.of[FORWARD] == 6


def test_the_list_holds_what_a_forward_calls():
    """What is left out gives gradients."""
    private = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("attention_ops::_")]
    names = {name for name in private if "attention" in name.removeprefix("attention_ops::_")}
    forwards = {name for name in names if not name.endswith("_backward")}
    assert {op.name() for op in attention_ops.COMPUTE_INTENSIVE_OPS} == forwards


def through_hooks(layer: Layer, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.numpy(force=True).copy(), torch.from_numpy):
        return layer(x)


def through_the_cpu(layer: Layer, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return layer(x)


@pytest.mark.parametrize("call", [through_hooks, through_the_cpu])
def test_hooks_on_saved_tensors(call):
    check(call)


def test_what_a_forward_saves():
    """query, key, value, bias, sinks, the mask's tensors, out and lse; no more than linear in the lengths."""
    seen = []
    leaves = [torch.randn(2, 4, 50, 8, requires_grad=True) for _ in range(3)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(tuple(x.shape)) or x, lambda x: x):
        attention_ops.attention(*leaves, mask=masks.padding(torch.tensor([50, 7])))
    assert sorted(seen) == sorted([(2, 4, 50, 8)] * 4 + [(2, 4, 50), (2,)])
