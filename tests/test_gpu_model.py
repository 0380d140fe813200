"""The model that runs CUDA kernels on the processor: it finds the bugs it is there for, and is silent without them."""

import pytest
import torch
from backends import model, on_model

import attention_ops

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
        passes, fewest = ops.take_counters()[2:]
        assert (passes == fewest) == swizzled
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
            count, _, passes, fewest = ops.take_counters()
        assert passes == fewest
        products.append(count)
    assert 0 < products[1] <= 2.5 * products[0]
