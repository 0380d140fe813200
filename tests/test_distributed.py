"""Several processes: training with DDP and FSDP2, and operators on DTensors, give what one process gives."""

import functools
import os
import pathlib

import pytest
import torch
from processes import run_alone, run_together
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import attention_ops
from attention_ops import distributed, masks, rotary

OPS = torch.ops.attention_ops
WIDTH, HEADS, KEY_HEADS, LENGTH = 16, 4, 2, 9
CLOSE = {"rtol": 1e-11, "atol": 1e-11}  # float64; sums over processes come in another order


class Block(nn.Module):
    """Attention with everything that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(1, HEADS, 1, LENGTH))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        projections = (self.query, HEADS), (self.key, KEY_HEADS), (self.value, KEY_HEADS)
        query, key, value = (project(x).unflatten(-1, (heads, -1)).transpose(1, 2) for project, heads in projections)
        mask = masks.causal() & masks.padding(lengths)
        out = attention_ops.attention(query, key, value, mask=mask, bias=self.bias, sinks=self.sinks)
        return x + self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, lengths)
        return x


def train(model: nn.Module, x: Tensor, lengths: Tensor, target: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x, lengths), target).backward()
        optimizer.step()


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def training(rank: int) -> None:
    for wrap in (ddp, fsdp2):
        model = Model().double()
        alone = Model().double()
        alone.load_state_dict(model.state_dict())
        x, target = torch.randn(2, 4, LENGTH, WIDTH, dtype=torch.float64)
        batch = x, torch.tensor([9, 5, 1, 7]), target
        train(alone, *batch)
        wrapped = wrap(model)
        train(wrapped, *(part.chunk(2)[rank] for part in batch))
        for (name, ours), wanted in zip(wrapped.named_parameters(), alone.parameters(), strict=True):
            full = [x.full_tensor() if isinstance(x, DTensor) else x for x in (ours, ours.grad)]
            torch.testing.assert_close(
                full, [wanted, wanted.grad], msg=lambda text, name=name: f"{name}: {text}", **CLOSE
            )


def test_training_with_ddp_and_fsdp2_equals_that_of_one_process():
    run_together(training)


OPTIONAL = {"bias": (1, 4, 1, 7), "sinks": (4,)}
B, H, LQ, LK = 3, 4, 5, 7  # the batch is shared out unevenly


def given(key_heads: int, heads: int = H, names: tuple[str, ...] = ("bias", "sinks")) -> dict[str, Tensor]:
    sizes = {"query": (B, heads, LQ, 8), "key": (B, key_heads, LK, 8), "value": (B, key_heads, LK, 6)}
    sizes |= {name: OPTIONAL[name] for name in names}
    return {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}


def gradients(function, tensors: dict[str, Tensor], needed: tuple[str, ...]) -> tuple[list[Tensor], list[Tensor]]:
    leaves = {name: x.detach().requires_grad_(name in needed) for name, x in tensors.items()}
    results = function(**leaves)
    sum(result.square().sum() for result in results).backward()
    return [result.detach() for result in results], [leaves[name].grad for name in needed]


def everything(mask: masks.Mask, **tensors: Tensor) -> list[Tensor]:
    """All operators, so that every private one is met, forward and backward."""
    results = [*attention_ops.attention(**tensors, mask=mask, return_lse=True)]
    del tensors["value"]
    return [
        *results,
        attention_ops.attention_weights(**tensors, mask=mask),
        *attention_ops.attention_summaries(**tensors, mask=mask),
    ]


def check(mesh: DeviceMesh, tensors: dict[str, Tensor], placements: dict, mask, needed: tuple[str, ...]) -> list:
    """Results and gradients equal those of plain tensors; returns the results' placements."""
    wanted = gradients(functools.partial(everything, mask()), tensors, needed)
    placed = {name: distribute_tensor(x, mesh, [placements.get(name, Replicate())]) for name, x in tensors.items()}
    distribute = functools.partial(distribute_tensor, device_mesh=mesh, placements=[Replicate()])
    ours = gradients(functools.partial(everything, mask(distribute)), placed, needed)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert [x.shape for x in mine] == [x.shape for x in theirs]
        torch.testing.assert_close([x.full_tensor() for x in mine], theirs, **CLOSE)
    return [result.placements[0] for result in ours[0]]


def some_mask(place=lambda x: x) -> masks.Mask:
    lengths, visible = torch.tensor([7, 2, 4]), torch.rand(1, H, LQ, LK, generator=torch.Generator().manual_seed(1))
    return masks.padding(place(lengths)) & (masks.causal() | masks.dense(place(visible < 0.7)))


BATCH = {name: Shard(0) for name in ("query", "key", "value")}
HEAD = {name: Shard(1) for name in ("query", "key", "value", "bias")} | {"sinks": Shard(0)}
EACH = ("query", "key", "value", "bias", "sinks")


def dtensors(rank: int) -> None:
    distributed.register()
    mesh = init_device_mesh("cpu", (2,))
    # With two key heads, the second and the third ask for gradients that the one before did not.
    for key_heads, needed in ((2, ("key", "sinks")), (2, ("query", "bias")), (2, EACH), (1, EACH), (4, EACH)):
        tensors = given(key_heads)
        assert set(check(mesh, tensors, BATCH, some_mask, needed)) == {Shard(0)}
        head = HEAD if key_heads > 1 else {**HEAD, "key": Replicate(), "value": Replicate()}
        assert set(check(mesh, tensors, head, some_mask, needed)) == {Shard(1)}


def second_order(tensors: dict[str, Tensor]) -> list[Tensor]:
    """The gradient of a gradient of all operators."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    loss = sum(result.square().sum() for result in everything(masks.causal(), **leaves))
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    return list(torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values())))


def tangents(place) -> list[Tensor]:
    """Forward mode by its operators: torch cannot make a DTensor dual."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (B, H, LQ, 8), "key": (B, 2, LK, 8), "value": (B, 2, LK, 6), "none": (B, 2, LK, 0)}
    sizes |= {"out": (B, H, LQ, 6), "lse": (B, H, LQ), "bias": (1, H, 1, LK)}
    sizes["distance"] = (1, H, LQ + LK - 1, 9)
    x = {name: place(torch.randn(size, generator=generator), name) for name, size in sizes.items()}
    options = x["bias"], x["distance"], None, [], "causal", 0.3, 0.0, 0.0, None
    of_scores = x["query"], x["key"], None, x["distance"], x["lse"]  # tangents of query, key, bias, distance, lse
    pair, argmax = (x["query"], x["key"]), place(torch.ones(B, H, LQ, dtype=torch.int64), "lse")
    return [
        *OPS._attention_jvp(
            *pair, x["value"], *options, x["out"], x["lse"], *pair, x["value"], None, x["distance"], None
        ),
        OPS._attention_weights_jvp(*pair, x["none"], *options, x["lse"], None, None, LQ, False, *of_scores),
        *OPS._attention_summaries_jvp(*pair, x["none"], *options, x["lse"], argmax, *of_scores),
    ]


def second_derivatives(rank: int) -> None:
    distributed.register()
    mesh = init_device_mesh("cpu", (2,))
    tensors = given(2)
    wanted = second_order(tensors)
    for placements in (BATCH, HEAD):
        placed = {name: distribute_tensor(x, mesh, [placements.get(name, Replicate())]) for name, x in tensors.items()}
        for mine, theirs in zip(second_order(placed), wanted, strict=True):
            torch.testing.assert_close(mine.full_tensor(), theirs, **CLOSE)
        shard = placements["query"]

        def place(x: Tensor, name: str, shard=shard) -> Tensor:
            is_shared = name in ("bias", "distance") and shard == Shard(0)
            return distribute_tensor(x, mesh, [Replicate() if is_shared else shard])

        for mine, theirs in zip(tangents(place), tangents(lambda x, name: x), strict=True):
            assert mine.placements == (shard,)
            torch.testing.assert_close(mine.full_tensor(), theirs)


def rotated(rank: int) -> None:
    """Queries and keys, alone and inside attention; the table is the same for all."""
    distributed.register()
    mesh = init_device_mesh("cpu", (2,))
    names = ("query", "key", "value")

    def turn(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        turned = attention_ops.rope(query, layout="interleaved", positions=torch.arange(B * LQ).view(B, LQ))
        option = rotary.Rope(positions=torch.arange(B * LK).view(B, LK))
        return [turned, attention_ops.attention(query, key, value, mask="causal", rope=option)]

    tensors = given(2, names=())
    wanted = gradients(turn, tensors, names)
    for placement in (Shard(0), Shard(1)):
        placed = {name: distribute_tensor(x, mesh, [placement]) for name, x in tensors.items()}
        ours = gradients(turn, placed, names)
        assert all(x.placements == (placement,) for x in ours[0])
        for mine, theirs in zip(ours, wanted, strict=True):
            torch.testing.assert_close([x.full_tensor() for x in mine], theirs, **CLOSE)


def all_derivatives(rank: int) -> None:
    dtensors(rank)
    rotated(rank)
    second_derivatives(rank)


def test_operators_on_dtensors():
    run_together(all_derivatives)


def no_mask(place=None) -> masks.Mask:
    return masks.causal()


def corners(rank: int) -> None:
    """Where sharing out would be wrong, and where it is only unusual."""
    distributed.register()
    mesh = init_device_mesh("cpu", (2,))
    tensors = given(3, heads=6, names=())  # three key heads cannot be shared out to two, with the queries of each
    unshared = check(mesh, tensors, HEAD, no_mask, ("query", "key", "value"))
    assert Shard(1) not in unshared
    uneven = given(3, heads=3, names=())
    assert set(check(mesh, uneven, HEAD, no_mask, ("query", "key", "value"))) == {Shard(1)}
    one = {name: x[:1] for name, x in given(2).items() if name != "sinks"}
    assert Shard(0) not in check(mesh, one, {}, no_mask, ("query", "bias"))

    check_weights(mesh)


def check_weights(mesh: DeviceMesh) -> None:
    """Their mean wants all heads; of chosen heads the numbers count, for the mask."""
    query, key, lse = torch.randn(B, 2, LQ, 8), torch.randn(B, 2, LK, 8), torch.randn(B, 2, LQ)
    visible = torch.rand(1, H, LQ, LK) < 0.5
    place = functools.partial(distribute_tensor, device_mesh=mesh)
    share, keep = functools.partial(place, placements=[Shard(1)]), functools.partial(place, placements=[Replicate()])

    def weights(share, keep, heads: list[Tensor], seen: Tensor, average: bool) -> Tensor:
        tensors = share(query), share(key), share(key[..., :0]), None, None, None, [keep(seen)]
        chosen = keep(heads[0]) if heads else None
        last = share(lse), chosen, None, LQ, average
        return OPS._attention_weights(*tensors, "dense", 0.3, 0.0, 0.0, None, *last)

    for call in (([torch.tensor([3, 1])], visible, False), ([], visible[:, :2], True)):
        wanted = weights(lambda x: x, lambda x: x, *call)
        torch.testing.assert_close(weights(share, keep, *call).full_tensor(), wanted)


def dropout(rank: int) -> None:
    distributed.register()
    mesh, seed = init_device_mesh("cpu", (2,)), torch.tensor([11])
    tensors = given(2, names=())

    def drop(place, rows: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
        placed = {name: place(x) for name, x in tensors.items()}
        return gradients(
            lambda **x: [attention_ops.attention(**x, dropout_p=0.5, seed=rows)], placed, ("query", "key", "value")
        )

    with pytest.raises(ValueError, match="attention: expected seed a Tensor with dropout of DTensors, got None"):
        drop(functools.partial(distribute_tensor, device_mesh=mesh, placements=[Shard(0)]), None)
    wanted = drop(lambda x: x, seed)
    rows = distributed.row_seeds(seed, B)
    for placement, seeds, kept in (
        (Shard(0), distribute_tensor(rows, mesh, [Shard(0)]), True),
        (Shard(0), distribute_tensor(rows, mesh, [Replicate()]), True),
        (Shard(0), distribute_tensor(seed, mesh, [Replicate()]), False),
        (Shard(1), distribute_tensor(seed, mesh, [Replicate()]), False),
        (Shard(1), distribute_tensor(rows, mesh, [Replicate()]), False),
    ):
        ours = drop(functools.partial(distribute_tensor, device_mesh=mesh, placements=[placement]), seeds)
        assert (ours[0][0].placements == (placement,)) == kept
        for mine, theirs in zip(ours, wanted, strict=True):
            torch.testing.assert_close([x.full_tensor() for x in mine], theirs, **CLOSE)


def corners_and_dropout(rank: int) -> None:
    corners(rank)
    dropout(rank)


def test_what_sharding_would_change_is_gathered():
    run_together(corners_and_dropout)


def simulated() -> None:
    """Eight ranks in one process: each mesh dimension may share out the batch or the heads."""
    from torch.distributed._local_tensor import LocalTensorMode

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    distributed.register()
    with LocalTensorMode(8):
        mesh = init_device_mesh("cpu", (2, 4))
        for heads, key_heads, shared in ((8, 8, True), (8, 4, True), (4, 1, True), (24, 12, False)):
            tensors = given(key_heads, heads=heads, names=())
            wanted = gradients(only_attention, tensors, EACH[:3])
            placements = [[Shard(0), Shard(1) if x.shape[1] > 1 else Replicate()] for x in tensors.values()]
            placed = {
                name: distribute_tensor(x, mesh, p) for (name, x), p in zip(tensors.items(), placements, strict=True)
            }
            ours = gradients(only_attention, placed, EACH[:3])
            # 24 heads on 12 key heads, were both dimensions to share them out, would not stay in their groups.
            assert (ours[0][0].placements == (Shard(0), Shard(1))) == shared
            for mine, theirs in zip(ours[0] + ours[1], wanted[0] + wanted[1], strict=True):
                torch.testing.assert_close(mine.full_tensor().reconcile(), theirs, **CLOSE)


def only_attention(**tensors: Tensor) -> list[Tensor]:
    return [attention_ops.attention(**tensors, mask="causal")]


def test_a_mesh_with_two_dimensions():
    pytest.importorskip("torch.distributed._local_tensor", reason="torch cannot simulate ranks before 2.13")
    tests = pathlib.Path(__file__).parent
    run_alone("import test_distributed as t; t.simulated()", PYTHONPATH=f"{tests.parent}{os.pathsep}{tests}")


def test_row_seeds_draw_what_the_seed_draws():
    seed = torch.tensor([5])
    rows = distributed.row_seeds(seed, 4)
    whole = attention_ops.dropout_mask(seed, 4, 2, 3, 40, 0.5)
    assert torch.equal(attention_ops.dropout_mask(rows, 4, 2, 3, 40, 0.5), whole)
    assert torch.equal(attention_ops.dropout_mask(rows[2:], 2, 2, 3, 40, 0.5), whole[2:])
    with pytest.raises(ValueError, match=r"row_seeds: expected seed shape \[1\], got \[2\]"):
        distributed.row_seeds(torch.tensor([1, 2]), 4)


def test_every_operator_with_rows_of_heads_is_registered():
    names = {
        name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("attention_ops::_")
    }
    with_rows = {
        name
        for name in names
        if any(a.name in ("query", "x") for a in torch._C._get_schema(f"attention_ops::{name}", "").arguments)
    }
    assert with_rows == set(distributed.NAMES)
