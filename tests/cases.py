"""The grid: shapes, masks, options, types and strides, chosen so that every two values meet in some case."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attention_ops import masks


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.heads}:{self.kv_heads}x{self.queries}:{self.keys}x{self.width}:{self.value_width}"

    @property
    def square(self) -> bool:
        return self.queries == self.keys


SHAPES = [
    Shape(2, 2, 2, 7, 7, 8, 8),
    Shape(1, 1, 1, 1, 1, 1, 1),
    Shape(1, 2, 1, 1, 130, 64, 64),  # a decoding step
    Shape(2, 4, 2, 63, 63, 20, 20),
    Shape(1, 2, 2, 64, 64, 64, 64),
    Shape(2, 3, 3, 65, 65, 33, 33),
    Shape(1, 6, 2, 130, 130, 3, 5),
    Shape(1, 2, 1, 65, 130, 80, 33),
    Shape(2, 2, 2, 130, 63, 8, 1),
    Shape(1, 1, 1, 64, 7, 129, 100),
    Shape(1, 4, 1, 7, 65, 100, 129),
    Shape(3, 1, 1, 63, 64, 1, 3),
]
EMPTY_SHAPES = [
    Shape(**{**dataclasses.asdict(Shape(2, 2, 2, 5, 6, 8, 4)), **zero})
    for zero in (
        {"batch": 0},
        {"heads": 0, "kv_heads": 0},
        {"queries": 0},
        {"keys": 0},
        {"width": 0},
        {"value_width": 0},
        {"queries": 0, "keys": 0},
        {"width": 0, "value_width": 0},
    )
]


def lengths(shape: Shape, limit: int) -> Tensor:
    """Integers [B] from 0 to `limit`: of three samples the first is cut, the second empty, the third cut shorter."""
    first = limit * 3 // 5
    return (first + torch.arange(shape.batch) * (limit + 1 - first)) % (limit + 1)


def layout(shape: Shape, block: int, *axes: int) -> Tensor:
    return torch.rand(*axes, -(-shape.queries // block), -(-shape.keys // block)) < 0.5


MaskMaker = Callable[[Shape], masks.Mask]
KINDS: dict[str, MaskMaker] = {
    "causal": lambda s: masks.causal(),
    "upper_left": lambda s: masks.causal("upper_left"),
    "window": lambda s: masks.sliding_window(5, 2),
    "window_left": lambda s: masks.sliding_window(None, 1),
    "window_right": lambda s: masks.sliding_window(3, None),
    "window_apart": lambda s: masks.sliding_window(-2, 20),
    "dilated": lambda s: masks.dilated(3),
    "padding": lambda s: masks.padding(lengths(s, s.keys)),
    "query_padding": lambda s: masks.padding(queries=lengths(s, s.queries)),
    "prefix_lm": lambda s: masks.prefix_lm(lengths(s, s.keys)),
    "block_sparse": lambda s: masks.block_sparse(layout(s, 16, s.batch, s.heads), 16),
    "ranges": lambda s: masks.ranges(
        torch.randint(0, s.keys + 1, (s.batch, 1, s.queries)), torch.randint(0, s.keys + 1, (1, s.heads, s.queries))
    ),
    "dense": lambda s: masks.dense(torch.rand(s.batch, s.heads, s.queries, s.keys) < 0.5),
    "dense_keys": lambda s: masks.dense(torch.rand(s.keys) < 0.7),
    "dense_rows": lambda s: masks.dense(torch.rand(s.batch, 1, s.queries, 1) < 0.7),
}
SQUARE_KINDS: dict[str, MaskMaker] = {  # where Lq = Lk
    "document": lambda s: masks.document(torch.randint(0, 3, (s.batch, s.keys)).sort(-1).values),
    "document_mixed": lambda s: masks.document(torch.randint(0, 3, (s.keys,))),
    "global_tokens": lambda s: masks.global_tokens(torch.rand(s.batch, s.keys) < 0.1),
}
BOTH: dict[str, MaskMaker] = {
    "causal&padding": lambda s: KINDS["causal"](s) & KINDS["padding"](s),
    "window|dilated&causal": lambda s: KINDS["window"](s) | KINDS["dilated"](s) & KINDS["causal"](s),
    "nothing": lambda s: masks.sliding_window(0, -1),
}
MASKS: dict[str, MaskMaker | None] = {"no_mask": None, **KINDS, **SQUARE_KINDS, **BOTH}

# The axes of a bias, the type it has (None: query's), and the part of its places that is -inf.
BIASES: dict[str, tuple[str, torch.dtype | None, float] | None] = {
    "no_bias": None,
    "bias": ("BHqk", None, 0),
    "bias_inf": ("BHqk", None, 0.3),
    "bias_float32": ("1Hqk", torch.float32, 0.1),
    "bias_keys": ("B11k", None, 0.1),
    "bias_rows": ("1Hq1", None, 0),
    "bias_number": ("1111", None, 0),
    "bias_plane": ("11qk", None, 0),
    "bias_sliced": ("BHqk+", None, 0),
}

# What depends on the distance alone: for each argument its batch and heads, its type, and the part that is -inf.
DISTANCES: dict[str, dict[str, tuple[str, torch.dtype | None, float]]] = {
    "no_distance": {},
    "distance_bias": {"distance_bias": ("1H", torch.float32, 0)},
    "distance_bias_inf": {"distance_bias": ("BH", None, 0.2)},
    "relative_key": {"relative_key": ("11", None, 0)},
    "relative_value": {"relative_value": ("B1", torch.float32, 0)},
    "clipped": {"relative_key": ("1H", None, 0), "relative_value": ("B1", None, 0)},
    "relative": {"distance_bias": ("1H", None, 0), "relative_key": ("1H", None, 0), "relative_value": ("11", None, 0)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    shape: Shape
    mask: str = "no_mask"
    bias: str = "no_bias"
    distance: str = "no_distance"
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    strides: str = "contiguous"

    def __str__(self) -> str:
        words = [
            str(self.shape),
            self.mask,
            self.bias,
            self.distance,
            str(self.dtype).removeprefix("torch."),
            self.strides,
        ]
        words += ["sinks"] * self.sinks + [f"cap{self.softcap}"] * (self.softcap is not None)
        words += [f"scale{self.scale}"] * (self.scale is not None) + [f"drop{self.dropout_p}"] * (self.dropout_p > 0)
        return "-".join(words)

    @property
    def possible(self) -> bool:
        return self.shape.square or self.mask not in SQUARE_KINDS


AXES = {
    "shape": SHAPES,
    "mask": list(MASKS),
    "bias": list(BIASES),
    "distance": list(DISTANCES),
    "sinks": [False, True],
    "softcap": [None, 2.5],
    "scale": [None, 0.0, -0.7],
    "dropout_p": [0.0, 0.3],
    "dtype": [torch.float32, torch.bfloat16, torch.float16, torch.float64],
    "strides": ["contiguous", "transposed", "sliced", "stepped", "expanded"],
}


def pairwise() -> Iterator[Case]:
    """Cases in which every two values of two axes meet (where they can), chosen greedily, the same on every run."""
    names = list(AXES)
    missing = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(names, 2)
        for x in AXES[a]
        for y in AXES[b]
        if {a, b} != {"shape", "mask"} or Case(**{a: x, b: y}).possible
    }
    order = sorted(missing, key=lambda pair: sorted(map(str, pair)))
    dice = random.Random(0)
    for start in order:
        if start not in missing:
            continue
        chosen = dict(start)
        for name in sorted(names, key=lambda n: -len(AXES[n])):
            if name not in chosen:
                chosen[name] = _best(chosen, name, missing, dice)
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        yield Case(**chosen)


def _best(chosen: dict, name: str, missing: set, dice: random.Random) -> object:
    def gain(value: object) -> tuple[int, float]:
        return sum(frozenset(((name, value), item)) in missing for item in chosen.items()), dice.random()

    return max((value for value in AXES[name] if _fits({**chosen, name: value})), key=gain)


def _fits(chosen: dict) -> bool:
    return not {"shape", "mask"} <= set(chosen) or Case(shape=chosen["shape"], mask=chosen["mask"]).possible


@dataclasses.dataclass
class Inputs:
    """The tensors of a case, those that have a gradient by name, and the other arguments."""

    tensors: dict[str, Tensor]
    options: dict[str, object]

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values as contiguous tensors of one type."""
        tensors = {name: t.detach().to(dtype).contiguous().requires_grad_() for name, t in self.tensors.items()}
        return Inputs(tensors, self.options)

    def on(self, device: str) -> "Inputs":
        """The same values in the same memory layout on a device."""
        if device == "cpu":
            return self
        tensors = {name: moved(t, device).requires_grad_() for name, t in self.tensors.items()}
        options = dict(self.options)
        if "mask" in options:
            data = tuple(moved(t, device) for t in options["mask"].data)
            options["mask"] = dataclasses.replace(options["mask"], data=data)
        if "seed" in options:
            options["seed"] = options["seed"].to(device)
        return Inputs(tensors, options)


def moved(x: Tensor, device: str) -> Tensor:
    """A copy of the tensor's whole storage on a device, seen in the same way."""
    storage = torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage())
    return torch.as_strided(storage.to(device), x.size(), x.stride(), x.storage_offset())


def make(case: Case) -> Inputs:
    shape = case.shape
    tensors = {
        "query": strided((shape.batch, shape.heads, shape.queries, shape.width), case.dtype, case.strides),
        "key": strided((shape.batch, shape.kv_heads, shape.keys, shape.width), case.dtype, case.strides),
        "value": strided((shape.batch, shape.kv_heads, shape.keys, shape.value_width), case.dtype, case.strides),
    }
    if (bias := make_bias(case)) is not None:
        tensors["bias"] = bias
    tensors |= make_distances(case)
    if case.sinks:
        tensors["sinks"] = torch.randn(shape.heads, dtype=case.dtype)
    options: dict[str, object] = {"scale": case.scale, "softcap": case.softcap}
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "seed": torch.tensor([2**40 + 17])}
    if MASKS[case.mask] is not None:
        options["mask"] = MASKS[case.mask](shape)
    return Inputs({name: t.detach().requires_grad_() for name, t in tensors.items()}, options)


def make_bias(case: Case) -> Tensor | None:
    if BIASES[case.bias] is None:
        return None
    axes, dtype, infinite = BIASES[case.bias]
    sizes = {"B": case.shape.batch, "H": case.shape.heads, "q": case.shape.queries, "k": case.shape.keys, "1": 1}
    dtype = case.dtype if dtype is None or case.dtype == torch.float64 else dtype
    sizes = [sizes[axis] for axis in axes.rstrip("+")]
    bias = strided(sizes, dtype, "sliced" if axes.endswith("+") else "contiguous")
    return torch.where(torch.rand(sizes) < infinite, -torch.inf, bias) if infinite else bias


def make_distances(case: Case) -> dict[str, Tensor]:
    shape, made = case.shape, {}
    entries = shape.queries + shape.keys - 1 if shape.queries and shape.keys else 0
    for name, (axes, dtype, infinite) in DISTANCES[case.distance].items():
        width = {"distance_bias": 1, "relative_key": shape.width, "relative_value": shape.value_width}[name]
        sizes = [{"B": shape.batch, "H": shape.heads, "1": 1}[axis] for axis in axes] + [entries, width]
        dtype = case.dtype if dtype is None or case.dtype == torch.float64 else dtype
        x = strided(sizes, dtype, case.strides)
        x = torch.where(torch.rand(sizes) < infinite, -torch.inf, x) if infinite else x
        if case.distance == "clipped":  # far from the diagonal, where all rows of a tile are then the same
            x = x.clone()  # of an expanded one
            x[..., entries // 2 + 20 :, :] = x[..., entries // 2 + 20 :, :][..., :1, :].clone()
        made[name] = x[..., 0] if name == "distance_bias" else x
    return made


def strided(sizes: tuple[int, ...] | list[int], dtype: torch.dtype, strides: str) -> Tensor:
    """Random numbers in a memory layout; what lies outside the view is NaN."""
    batch, heads, length, width = sizes
    if strides == "transposed":
        return torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2)
    if strides == "sliced":
        whole = torch.full((batch, heads, length + 3, width + 5), torch.nan, dtype=dtype)
        view = whole[:, :, 1 : length + 1, 2 : width + 2]
    elif strides == "stepped":
        whole = torch.full((batch, heads, 2 * length, 2 * width), torch.nan, dtype=dtype)
        view = whole[:, :, ::2, 1::2]
    elif strides == "expanded":
        return torch.randn(batch, 1, length, width).to(dtype).expand(batch, heads, length, width)
    else:
        return torch.randn(batch, heads, length, width).to(dtype)
    return view.copy_(torch.randn(sizes))


def small_inputs() -> dict[str, Tensor]:
    """Every differentiable input, of a size for numerical derivatives."""
    sizes = {"query": (2, 2, 3, 3), "key": (2, 1, 5, 3), "value": (2, 1, 5, 2), "bias": (1, 2, 3, 5), "sinks": (2,)}
    return {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}


def rows_summed(case: Case, name: str, grad: Tensor) -> float:
    """Over how many rows of scores each place of a bias's or a sink's gradient is summed; a row whose terms dropout has
    scaled up counts for more."""
    rows = case.shape.batch * case.shape.heads * case.shape.queries
    by_distance = grad.shape[:2] if name.startswith(("distance", "relative")) else None
    kept = {"bias": grad.shape[:3], "sinks": grad.shape}.get(name, by_distance)
    return (1 if kept is None else rows / max(1, kept.numel())) / (1 - case.dropout_p) ** 2


OF_VALUES = ("value", "relative_value")  # inputs that weights do not depend on
CASES = list(pairwise())
COMPACT = CASES[:: max(1, len(CASES) // 40)]
