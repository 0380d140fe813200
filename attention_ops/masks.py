"""Masks: values that say which key a query may attend to, and that compose with `&` and `|`.

A mask is a short text for the kernels, the tensors that the text consumes, and the same rule as a dense
predicate. `True` always means *may attend*. Rules are written with query row i, key column j, and
d = j - (i + Lk - Lq), the distance from the diagonal that joins the last query to the last key.
"""

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "Mask",
    "Places",
    "block_sparse",
    "blocked",
    "causal",
    "dense",
    "dilated",
    "document",
    "global_tokens",
    "padding",
    "parse",
    "prefix_lm",
    "ranges",
    "sliding_window",
]


@dataclasses.dataclass(frozen=True)
class Places:
    """The index grid that a predicate is asked about."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device | str = "cpu"

    @property
    def i(self) -> Tensor:
        return torch.arange(self.queries, device=self.device)[:, None]  # [Lq, 1]

    @property
    def j(self) -> Tensor:
        return torch.arange(self.keys, device=self.device)  # [Lk]

    @property
    def distance(self) -> Tensor:
        return self.j - (self.i + self.keys - self.queries)  # [Lq, Lk]


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Which places are visible: `spec` and `data` for the kernels, `predicate` for everybody else.

    A mask cannot be changed, and can be copied and pickled. It equals itself alone, since it may hold tensors.

    >>> mask = causal() & (sliding_window(2, None) | dilated(4))
    >>> mask.spec
    'causal & (sliding_window(2, unbounded) | dilated(4))'
    """

    spec: str
    data: tuple[Tensor, ...]
    predicate: Callable[[Places], Tensor]

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        spec = f"{self._grouped()} & {other._grouped()}"
        return Mask(spec, self.data + other.data, _rule(_combined, operator.and_, self.predicate, other.predicate))

    def __or__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        spec = f"{self.spec} | {other.spec}"
        return Mask(spec, self.data + other.data, _rule(_combined, operator.or_, self.predicate, other.predicate))

    def __bool__(self) -> bool:
        """`a and b` would be b alone."""
        raise TypeError("Mask: expected & or | to combine masks (`is None` to ask for one), got and, or, not or if")

    def _grouped(self) -> str:
        return f"({self.spec})" if "|" in self.spec else self.spec

    def __repr__(self) -> str:
        return f"Mask({self.spec!r}, {len(self.data)} tensors)"

    def dense(self, batch: int, heads: int, queries: int, keys: int) -> Tensor:
        """The whole mask as booleans [batch, heads, queries, keys].

        >>> causal().dense(1, 1, 2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        device = self.data[0].device if self.data else "cpu"
        visible = self.predicate(Places(batch, heads, queries, keys, device))
        return visible.expand(batch, heads, queries, keys)


# A rule is a function of this module with the mask's numbers and tensors filled in, so that masks can be pickled.
_rule = functools.partial


def _combined(combine: Callable[[Tensor, Tensor], Tensor], a: object, b: object, at: Places) -> Tensor:
    return combine(a(at), b(at))


def causal(align: str = "lower_right") -> Mask:
    """No look ahead: d <= 0, or j <= i when aligned at the upper left.

    The two differ only where Lq and Lk do: `"lower_right"` lets the last query see every key, as decoding
    with a cache needs; `"upper_left"` lets query 0 see key 0 alone, as `is_causal` of torch's own function.

    >>> causal("upper_left").dense(1, 1, 2, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    if align == "lower_right":
        return Mask("causal", (), _causal)
    if align == "upper_left":
        return Mask("causal(upper_left)", (), _causal_upper_left)
    raise ValueError(f"causal: expected align 'lower_right' or 'upper_left', got {align!r}")


def _causal(at: Places) -> Tensor:
    return at.distance <= 0


def _causal_upper_left(at: Places) -> Tensor:
    return at.j <= at.i


def sliding_window(left: int | None = None, right: int | None = None) -> Mask:
    """A band around the diagonal: -left <= d <= right; None is unbounded.

    `sliding_window(W - 1, 0)` is a causal window of W keys, the query's own included.

    >>> sliding_window(1, 0).dense(1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    words = [
        "unbounded" if bound is None else str(_integer("sliding_window", name, bound))
        for name, bound in (("left", left), ("right", right))
    ]
    return Mask(f"sliding_window({', '.join(words)})", (), _rule(_sliding_window, left, right))


def _sliding_window(left: int | None, right: int | None, at: Places) -> Tensor:
    visible = torch.ones_like(at.distance, dtype=torch.bool)
    if left is not None:
        visible = visible & (at.distance >= -left)
    return visible if right is None else visible & (at.distance <= right)


def dilated(step: int) -> Mask:
    """Every step-th key, counted from the diagonal: d mod step = 0.

    >>> dilated(2).dense(1, 1, 2, 4)[0, 0].int().tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    step = _integer("dilated", "step", step, least=1)
    return Mask(f"dilated({step})", (), _rule(_dilated, step))


def _dilated(step: int, at: Places) -> Tensor:
    return at.distance % step == 0


def padding(lengths: Tensor | None = None, queries: Tensor | None = None) -> Mask:
    """The real part of padded sequences: j < lengths[b], and i < queries[b] where that is given.

    `lengths` and `queries` are integers [B]. A row beyond its sample's `queries` sees nothing: its output is 0.
    Padding is on the right. On the left it is `document((arange(L) >= L - lengths[:, None]).long())`, or, of a boolean
    mask [B, Lk], `dense(mask[:, None, None])`.

    >>> padding(torch.tensor([1, 2])).dense(2, 1, 1, 3)[:, 0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    if lengths is None and queries is None:
        raise ValueError("padding: expected lengths or queries, got neither")
    parts = []
    if lengths is not None:
        _check_tensor("padding", "lengths", lengths, rank=1)
        parts.append(Mask("padding", (lengths,), _rule(_padding, lengths)))
    if queries is not None:
        _check_tensor("padding", "queries", queries, rank=1)
        parts.append(Mask("query_padding", (queries,), _rule(_query_padding, queries)))
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _padding(lengths: Tensor, at: Places) -> Tensor:
    return at.j < _of_rank(1, lengths)[:, None, None, None]


def _query_padding(lengths: Tensor, at: Places) -> Tensor:
    return at.i < _of_rank(1, lengths)[:, None, None, None]


def document(ids: Tensor) -> Mask:
    """Packed sequences: ids[i] = ids[j]. `ids` is an integer tensor [L], [1, L] or [B, L]; Lq = Lk = L.

    >>> document(torch.tensor([5, 5, 8])).dense(1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    _check_tensor("document", "ids", ids, rank=2)
    return Mask("document", (ids,), _rule(_document, ids))


def _document(ids: Tensor, at: Places) -> Tensor:
    ids = _of_rank(2, ids)  # [B|1, L]
    return (ids[:, :, None] == ids[:, None, :])[:, None]


def prefix_lm(lengths: Tensor) -> Mask:
    """A prompt read in both directions, then causal: d <= 0, or j < lengths[b]. `lengths` is an integer tensor [B].

    >>> prefix_lm(torch.tensor([2])).dense(1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    _check_tensor("prefix_lm", "lengths", lengths, rank=1)
    return Mask("prefix_lm", (lengths,), _rule(_prefix_lm, lengths))


def _prefix_lm(lengths: Tensor, at: Places) -> Tensor:
    return _causal(at) | _padding(lengths, at)


def global_tokens(flags: Tensor) -> Mask:
    """Tokens that see all and are seen by all: flags[i] or flags[j]. `flags` is boolean [L], [1, L] or [B, L].

    >>> global_tokens(torch.tensor([True, False, False])).dense(1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    _check_tensor("global_tokens", "flags", flags, rank=2)
    return Mask("global_tokens", (flags,), _rule(_global_tokens, flags))


def _global_tokens(flags: Tensor, at: Places) -> Tensor:
    flags = _of_rank(2, flags)
    return (flags[:, :, None] | flags[:, None, :])[:, None]


def block_sparse(layout: Tensor, block: int) -> Mask:
    """Whole blocks at a time: layout[..., i // block, j // block].

    `layout` is boolean [rows, columns], [H|1, rows, columns] or [B|1, H|1, rows, columns], with
    rows = ceil(Lq / block) and columns = ceil(Lk / block).

    >>> block_sparse(torch.tensor([[True, False]]), 2).dense(1, 1, 1, 3)[0, 0].int().tolist()
    [[1, 1, 0]]
    """
    block = _integer("block_sparse", "block", block, least=1)
    _check_tensor("block_sparse", "layout", layout, rank=4)
    return Mask(f"block_sparse({block})", (layout,), _rule(_block_sparse, layout, block))


def _block_sparse(layout: Tensor, block: int, at: Places) -> Tensor:
    return _of_rank(4, layout)[:, :, at.i // block, at.j // block]


def ranges(start: Tensor, end: Tensor) -> Mask:
    """One run of keys for each query: start[i] <= j < end[i]. Both are integers [Lq] or [B|1, H|1, Lq].

    >>> ranges(torch.tensor([0, 2]), torch.tensor([1, 3])).dense(1, 1, 2, 3)[0, 0].int().tolist()
    [[1, 0, 0], [0, 0, 1]]
    """
    _check_tensor("ranges", "start", start, rank=3)
    _check_tensor("ranges", "end", end, rank=3)
    return Mask("ranges", (start, end), _rule(_ranges, start, end))


def _ranges(start: Tensor, end: Tensor, at: Places) -> Tensor:
    return (_of_rank(3, start)[..., None] <= at.j) & (at.j < _of_rank(3, end)[..., None])


def dense(mask: Tensor) -> Mask:
    """A boolean tensor that broadcasts against [B, H, Lq, Lk]; True means may attend.

    It has 1, 2 or 4 dimensions. Three are refused when it is used, because they could be read in two ways. Two are
    [Lq, Lk]: a padding mask [B, Lk] is `mask[:, None, None]`.

    >>> dense(torch.tensor([True, False])).dense(1, 1, 2, 2)[0, 0].int().tolist()
    [[1, 0], [1, 0]]
    """
    _check_tensor("dense", "mask", mask, rank=4)
    return Mask("dense", (mask,), _rule(_dense, mask))


def _dense(mask: Tensor, at: Places) -> Tensor:
    return _of_rank(4, mask)


def blocked(mask: Tensor) -> Mask:
    """The other convention by its name: a boolean tensor in which True means may *not* attend.

    >>> blocked(torch.tensor([True, False])).dense(1, 1, 1, 2)[0, 0].int().tolist()
    [[0, 1]]
    """
    _check_tensor("blocked", "mask", mask, rank=mask.dim() if isinstance(mask, Tensor) else 0)
    if mask.dtype != torch.bool:
        raise TypeError(f"blocked: expected mask dtype bool, got {mask.dtype}")
    return dense(~mask)


WITHOUT_DATA = {"causal": causal, "sliding_window": sliding_window, "dilated": dilated}


def parse(spec: str) -> Mask:
    """The mask that a text without data stands for.

    >>> parse("causal & sliding_window(1, unbounded)").dense(1, 1, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    if not isinstance(spec, str):
        raise TypeError(f"mask: expected a text, got {type(spec).__name__}")
    try:
        return _parsed(ast.parse(spec.strip(), mode="eval").body)
    except (SyntaxError, KeyError) as error:
        kinds = ", ".join(WITHOUT_DATA)
        raise ValueError(f"mask: expected an expression of {kinds} with & and |, got {spec!r}") from error


def _parsed(node: ast.expr) -> Mask:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _parsed(left) & _parsed(right)
        case ast.BinOp(left, ast.BitOr(), right):
            return _parsed(left) | _parsed(right)
        case ast.Name(name):
            return WITHOUT_DATA[name]()
        case ast.Call(ast.Name(name), arguments):
            return WITHOUT_DATA[name](*(_argument(argument) for argument in arguments))
    raise SyntaxError(ast.unparse(node))


def _argument(node: ast.expr) -> int | str | None:
    if isinstance(node, ast.Name):
        return None if node.id == "unbounded" else node.id
    return ast.literal_eval(node)


def _integer(kind: str, name: str, value: object, least: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{kind}: expected {name} an integer, got {type(value).__name__}")
    if least is not None and value < least:
        raise ValueError(f"{kind}: expected {name} >= {least}, got {value}")
    return int(value)


def _check_tensor(kind: str, name: str, value: object, rank: int) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{kind}: expected {name} a Tensor, got {type(value).__name__}")
    if value.dim() > rank:
        raise ValueError(f"{kind}: expected {name} with at most {rank} dimensions, got {value.dim()}")


def _of_rank(rank: int, x: Tensor) -> Tensor:
    """x with axes of length 1 put in front until it has `rank` of them."""
    return x[(None,) * (rank - x.dim())]
