"""The model that runs CUDA kernels on the processor: it finds the bugs it is there for, and is silent without them."""

import cases
import pytest
import test_masks
import torch
from backends import model, on_model

import attention_ops
from attention_ops import masks

PLANTS = [
    "barrier-after-exit",
    "copy-not-waited",
    "divergent-barrier",
    "divergent-warp",
    "global-out-of-bounds",
    "global-race",
    "misaligned",
    "never-written",
    "race-read-after-write",
    "race-within-warp",
    "race-write-after-read",
    "shared-never-written",
    "shared-out-of-bounds",
    "write-to-input",
]


def test_every_plant_has_a_test():
    assert sorted([*PLANTS, "bank-conflict"]) == sorted(model().plant_names())


@pytest.mark.parametrize("schedule", [0, 1, 2])
@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name, schedule):
    ops = model()
    ops.take_findings()
    ops.set_options(schedule, schedule, 3, True)
    ops.run_plant(name, True)
    assert ops.take_findings() == []
    ops.run_plant(name, False)
    kinds = {"race-within-warp": ("race-read",), "barrier-after-exit": ("barrier-after-exit", "deadlock")}.get(
        name, name
    )
    assert any(text.startswith(kinds) for text in ops.take_findings())


def test_bank_conflicts_are_counted():
    ops = model()
    ops.take_counters()
    for swizzled in (True, False):
        ops.run_plant("bank-conflict", swizzled)
        counters = ops.take_counters()
        assert (counters["passes"] == counters["fewest_passes"]) == swizzled
    assert ops.take_findings() == []


@pytest.mark.parametrize("width", [40, 64, 128, 200])
def test_tensor_cores_do_what_the_visible_tiles_need_without_bank_conflicts(width):
    """Products grow with what a window shows, not with the square of the length."""
    ops, products = model(), []
    for length in (256, 512):
        leaves = [torch.randn(1, 1, length, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        with on_model():
            ops.take_counters()
            attention_ops.attention(*leaves, mask="sliding_window(20, 0)").sum().backward()
            counters = ops.take_counters()
        assert counters["passes"] == counters["fewest_passes"]
        products.append(counters["multiplications"])
    assert 0 < products[1] <= 2.5 * products[0]


# Queries and keys of a tile of rows of 64: of the forward pass, and of those for the gradients.
TILES = {"out": (128, 64), "query": (128, 64), "key": (32, 128)}


def products_of(mask: masks.Mask | None, length: int) -> dict[str, int]:
    """What tensor cores multiply in each pass."""
    counted = {}
    for name in TILES:
        leaves = {x: torch.randn(1, 2, length, 64, dtype=torch.bfloat16) for x in ("query", "key", "value")}
        if name != "out":
            leaves[name].requires_grad_()
        with on_model():
            model().take_counters()
            out = attention_ops.attention(**leaves, mask=mask)
            if name != "out":
                model().take_counters()
                out.sum().backward()
            counted[name] = model().take_counters()["multiplications"]
    return counted


@pytest.fixture(scope="module")
def products_of_a_tile() -> dict[str, int]:
    full = products_of(None, 256)
    tiles = {name: 2 * (256 // rows) * (256 // keys) for name, (rows, keys) in TILES.items()}
    assert all(full[name] > 0 == full[name] % tiles[name] for name in TILES)
    return {name: full[name] // tiles[name] for name in TILES}


@pytest.mark.parametrize("name", [*test_masks.ALL, *cases.BOTH])
def test_tiles_are_visited_where_something_is_visible(name, products_of_a_tile):
    shape = cases.Shape(1, 2, 2, 300, 300, 64, 64)
    mask = cases.MASKS[name](shape)
    visible = test_masks.dense_of(shape, mask)
    counted = products_of(mask, 300)
    for which, tile in TILES.items():
        assert counted[which] == products_of_a_tile[which] * test_masks.visible_tiles(visible, *tile), which
