"""The measured cases: shapes and options as values, and the calls that they stand for."""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Workload
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attention_ops
from attention_ops import masks

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WINDOW, DOCUMENT, BLOCK, DENSITY = 256, 512, 64, 0.1
DENORMAL = 1e-40


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one measurement; the name is made from what differs from the plain case."""

    batch: int = 1
    heads: int = 4
    length: int = 2048
    width: int = 64
    kind: str = "full"  # full, causal, window, documents, padding, blocks
    backward: bool = False
    dtype: str = "fp32"
    key_heads: int = 0  # 0: as many as heads
    value_width: int = 0  # 0: as wide as the key
    queries: int = 0  # 0: as many as keys
    dropout_p: float = 0.0
    bias: bool = False  # [1, H, Lq, Lk], with its gradient
    softcap: float | None = None
    sinks: bool = False
    denormal: str = ""  # which inputs hold denormal numbers alone: qkv, v
    operator: str = "attention"  # or weights, summaries
    derivative: str = ""  # jvp: with tangents of query, key and value; hvp: the gradient of the gradient's square
    quick: bool = False  # part of --quick

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        key_heads, queries = self.key_heads or self.heads, self.queries or self.length
        query = (self.batch, self.heads, queries, self.width)
        key = (self.batch, key_heads, self.length, self.width)
        return query, key, (self.batch, key_heads, self.length, self.value_width or self.width)

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else f"{self.heads}"
        what = self.derivative or ("fwd+bwd" if self.backward else "fwd")
        words = [self.dtype, self.kind, what, f"B{self.batch} H{heads}"]
        words.append(f"{self.queries}×{self.length}" if self.queries else f"S{self.length}")
        words.append(f"D{self.width}/{self.value_width}" if self.value_width else f"D{self.width}")
        if self.dropout_p:
            words.append(f"dropout {self.dropout_p}")
        return " ".join([*words, "bias gradient"] if self.bias else words)

    def flops(self, share: float) -> float:
        d, dv, (batch, heads, queries, _) = self.width, self.value_width or self.width, self.shapes[0]
        return share * batch * heads * queries * self.length * (2 * (d + dv) + (6 * d + 4 * dv) * self.backward)


def mask_of(case: Case) -> masks.Mask | None:
    length = case.length
    generator = torch.Generator().manual_seed(0)
    if case.kind == "full":
        return None
    if case.kind == "causal":
        return masks.causal()
    if case.kind == "window":
        return masks.sliding_window(WINDOW - 1, 0)
    if case.kind == "documents":
        return masks.document(torch.arange(length) // DOCUMENT)
    if case.kind == "padding":
        return masks.padding(torch.randint(1, length + 1, (case.batch,), generator=generator))
    rows = torch.arange(length // BLOCK)
    layout = torch.rand(len(rows), len(rows), generator=generator) < DENSITY
    return masks.block_sparse(layout | (rows[:, None] == rows), BLOCK)


def visible_share(case: Case) -> float:
    """The part of all (query, key) pairs that the mask lets see each other."""
    mask = mask_of(case)
    if mask is None:
        return 1.0
    return mask.dense(case.batch, 1, case.queries or case.length, case.length).float().mean().item()


class Inputs:
    """The tensors of a case, and what to do with its result."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        dtype = TYPES[case.dtype]
        self.backward, self.derivative = case.backward or case.derivative == "hvp", case.derivative
        self.tensors = [
            (torch.full(shape, DENORMAL) if name in case.denormal else torch.randn(shape)).to(dtype)
            for name, shape in zip("qkv", case.shapes, strict=True)
        ]
        self.bias = torch.randn(1, case.heads, case.length, case.length) if case.bias else None
        self.sinks = torch.randn(case.heads) if case.sinks else None
        self.leaves = [x for x in (*self.tensors, self.bias, self.sinks) if x is not None]
        for x in self.leaves:
            x.requires_grad_(self.backward)
        self.grad_out = torch.randn(*case.shapes[0][:-1], case.shapes[2][-1]).to(dtype)

    def run(self, function: Callable[..., Tensor]) -> None:
        if self.derivative == "jvp":
            torch.func.jvp(function, tuple(self.tensors), tuple(self.tensors))
            return
        out = function(*self.tensors)
        if not self.backward:
            return
        grads = torch.autograd.grad(out, self.leaves, self.grad_out, create_graph=self.derivative == "hvp")
        if self.derivative == "hvp":
            torch.autograd.grad(grads, self.leaves, self.tensors)


def ours(case: Case) -> Callable[[], None]:
    inputs, mask = Inputs(case), mask_of(case)
    query, key, _ = inputs.tensors
    options = {"mask": mask, "bias": inputs.bias, "sinks": inputs.sinks, "softcap": case.softcap}
    if case.operator == "weights":
        return lambda: attention_ops.attention_weights(query, key, **options)
    if case.operator == "summaries":
        return lambda: attention_ops.attention_summaries(query, key, **options)
    return lambda: inputs.run(functools.partial(attention_ops.attention, **options, dropout_p=case.dropout_p))


def peer(case: Case) -> Callable[[], None]:
    """The same with torch's own function. A mask other than causal is a dense boolean tensor, made before."""
    inputs = Inputs(case)
    options = {"dropout_p": case.dropout_p, "enable_gqa": bool(case.key_heads), "is_causal": case.kind == "causal"}
    if case.kind not in ("full", "causal"):
        options["attn_mask"] = mask_of(case).dense(case.batch, 1, case.length, case.length).contiguous()
    if case.bias:
        options["attn_mask"] = inputs.bias
    function = functools.partial(F.scaled_dot_product_attention, **options)
    if not case.derivative:
        return lambda: inputs.run(function)

    def with_formula() -> None:  # torch has these derivatives of its plain formula alone
        with sdpa_kernel(SDPBackend.MATH):
            inputs.run(function)

    return with_formula


def against_torch(case: Case) -> Workload:
    if case.derivative:
        return Workload(case.name, ours(case), peer(case))
    if not case.queries:
        return Workload(case.name, ours(case), peer(case), flops=case.flops(visible_share(case)))
    key, value = (torch.Size(shape).numel() for shape in case.shapes[1:])
    return Workload(case.name, ours(case), peer(case), bytes=(key + value) * TYPES[case.dtype].itemsize)


def pair(**options: object) -> list[Case]:
    """A case forward, and forward with backward."""
    return [Case(**options), Case(**options, backward=True)]


CASES = [
    *pair(batch=16, heads=8, length=64, width=32, kind="causal", quick=True),
    *pair(batch=16, heads=8, length=64),
    *pair(batch=8, heads=8, length=128, width=64),
    *pair(batch=8, heads=8, length=128, width=64, kind="causal"),
    *pair(batch=4, heads=8, length=256, width=64, kind="causal", quick=True),
    *pair(heads=8, length=512),
    *pair(heads=8, length=512, kind="causal", quick=True),
    *pair(heads=8, length=512, width=128),
    *pair(heads=8, length=512, width=128, kind="causal"),
    *pair(quick=True),
    *pair(kind="causal", quick=True),
    *pair(width=128),
    *pair(width=128, kind="causal"),
    *(Case(width=width) for width in (32, 72, 80, 96, 100, 192, 256)),
    *pair(dtype="bf16", quick=True),
    *pair(dtype="bf16", width=128),
    *pair(dtype="fp16"),
    *pair(dtype="fp16", width=128),
    *pair(dtype="bf16", kind="causal"),
    *pair(heads=8, key_heads=2, quick=True),
    Case(heads=8, key_heads=2, kind="causal", backward=True),
    *pair(value_width=32),
    Case(dropout_p=0.1, quick=True),
    Case(dropout_p=0.1, backward=True),
    Case(bias=True, backward=True, quick=True),
    *pair(heads=2, length=8192, kind="window"),
    *pair(heads=2, length=8192, kind="documents"),
    *pair(heads=2, length=8192, kind="blocks"),
    *pair(batch=4, kind="padding"),
    Case(heads=8, length=32768, queries=1, quick=True),
    Case(heads=8, key_heads=2, length=32768, queries=1),
    Case(heads=8, key_heads=1, length=32768, queries=1),
    Case(heads=8, length=16384, queries=1, width=128, dtype="bf16"),
    *pair(heads=1, length=16, width=16, quick=True),
    Case(derivative="jvp", quick=True),
    Case(derivative="hvp", quick=True),
    Case(derivative="hvp", kind="causal"),
]
