"""DTensor: how the operators share batch and heads out over a mesh. Nothing here is needed for DDP or FSDP, which hand
the operators ordinary tensors."""

import functools
import itertools
import math
import typing

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register", "row_seeds"]

# Every private operator with rows of several heads, query or x.
NAMES = (
    "_rope",
    "_rotary_attention_forward",
    "_rotary_attention_backward",
    "_attention_forward",
    "_attention_backward",
    "_attention_jvp",
    "_attention_double_backward",
    "_attention_weights",
    "_attention_weights_backward",
    "_attention_weights_jvp",
    "_attention_weights_double_backward",
    "_attention_summaries",
    "_attention_summaries_backward",
    "_attention_summaries_jvp",
    "_attention_summaries_double_backward",
)
Arguments = dict[str, typing.Any]  # by name; tensors as specs, which have ndim, shape and mesh


@functools.cache
def register() -> tuple[str, ...]:
    """Tells DTensor which placements the operators take; `attention` and the others then work on DTensors, the tensors
    of masks included.

    The batch may be sharded and the heads may be, over any mesh; what broadcasts there stays replicated, and its
    gradient is a partial sum. Key heads are shared out as query heads are, in groups, where every device gets as many,
    or are replicated if there is one. Everything else is gathered first, as DTensor does. With dropout, heads are
    gathered, since the numbers drawn depend on them, and the batch is too unless the seed is a row for each sample:
    see `row_seeds`. A seed has to be given then, the same on all devices.

        register()
        query, key, value = (distribute_tensor(x, mesh, [Shard(1)]) for x in (query, key, value))  # by heads
        out = attention(query, key, value, mask="causal")  # a DTensor, by heads too

    Returns:
        The names of the operators. A second call does nothing.

    >>> "_attention_forward" in register()
    True
    """
    for name in NAMES:
        op = getattr(torch.ops.attention_ops, name).default
        register_sharding(op)(functools.partial(_placements, op._schema))
        # register_sharding takes two calls that differ in a list of booleans for the same: `needed` has to count.
        DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(0, needs_pytree=True)
    return NAMES


def row_seeds(seed: Tensor, batch: int) -> Tensor:
    """A seed for each sample, so that a part of the batch draws what it would draw as part of the whole.

    Args:
        seed: int64 [1].
        batch: the number of samples of the whole batch.

    Returns:
        int64 [batch, 2]: the seed and the number of the sample. It drops the same weights as `seed` alone.

    Raises:
        ValueError: for a seed of another shape.

    >>> row_seeds(torch.tensor([7]), 3).tolist()
    [[7, 0], [7, 1], [7, 2]]
    """
    if seed.shape != (1,):
        raise ValueError(f"row_seeds: expected seed shape [1], got {list(seed.shape)}")
    return torch.stack([seed.expand(batch), torch.arange(batch, device=seed.device)], -1)


def replicated(x: Tensor, like: DTensor) -> DTensor:
    """x on every device of `like`."""
    return DTensor.from_local(x, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def _placements(schema: torch.FunctionSchema, *values: object) -> list[tuple[list, list]]:
    """The placements of results and of tensors that may go together, for one dimension of a mesh."""
    given = dict(zip((argument.name for argument in schema.arguments), values, strict=True))
    shared = [name for name, may in (("batch", _batch_may_be_shared), ("heads", _heads_may_be_shared)) if may(given)]
    return [_everywhere(schema, given), *(_shared(schema, given, along) for along in shared)]


def _batch_may_be_shared(given: Arguments) -> bool:
    seed = given.get("seed")
    return _rows(given).shape[0] > 1 and (seed is None or seed.ndim == 2)


def _heads_may_be_shared(given: Arguments) -> bool:
    """Not where the result depends on the number of a head, or on all of them."""
    if given.get("seed") is not None or given.get("average") or given.get("heads") is not None:
        return False
    rows = _rows(given)
    heads, key_heads = rows.shape[1], given.get("key", rows).shape[1]
    return heads > 1 and (key_heads in (1, heads) or _divides_evenly(key_heads, rows.mesh.shape))


def _rows(given: Arguments) -> typing.Any:
    return given["query" if "query" in given else "x"]


def _divides_evenly(size: int, mesh: tuple[int, ...]) -> bool:
    """Whether any of the mesh's dimensions that can share `size` out leave the same to every device."""
    counts = (math.prod(some) for n in range(1, len(mesh) + 1) for some in itertools.combinations(mesh, n))
    return all(size % count == 0 for count in counts if count <= size)


def _everywhere(schema: torch.FunctionSchema, given: Arguments) -> tuple[list, list]:
    return [Replicate() for _ in schema.returns], [None if x is None else Replicate() for _, x in _tensors(given)]


def _shared(schema: torch.FunctionSchema, given: Arguments, along: str) -> tuple[list, list]:
    results = [_of_result(result.name, index, given, along) for index, result in enumerate(schema.returns)]
    return results, [_of_input(name, x, along) for name, x in _tensors(given)]


def _tensors(given: Arguments) -> list[tuple[str, typing.Any]]:
    """Arguments with lists of tensors taken apart; what is no tensor is None."""
    found = []
    for name, value in given.items():
        values = value if name == "mask_data" else [value]
        found += [(name, x if hasattr(x, "ndim") else None) for x in values]
    return found


def _of_input(name: str, x: typing.Any, along: str) -> Placement | None:
    if x is None:
        return None
    axis = _axis(name, x.ndim, along)
    return Replicate() if axis is None or x.shape[axis] == 1 else Shard(axis)


def _axis(name: str, ndim: int, along: str) -> int | None:
    """Where a tensor has its batch or its heads: at 0 and 1, but for those without a batch and masks without heads."""
    if name in ("heads", "rows"):
        return None
    if name in ("sinks", "sinks_t"):
        return 0 if along == "heads" else None
    if along == "batch":
        return 0
    return None if name in ("seed", "table") or (name == "mask_data" and ndim < 3) else 1


def _of_result(name: str, index: int, given: Arguments, along: str) -> Placement:
    if "needed" in given and not given["needed"][index]:
        return Replicate()  # an empty tensor
    if not name.startswith("grad_"):
        return Shard(0 if along == "batch" else 1)
    of = name.removeprefix("grad_").removesuffix("_t")
    placement = _of_input(of, given[of], along)
    return Partial() if placement == Replicate() else placement
