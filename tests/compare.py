"""How results are compared: against float64, by the error that the plain formula makes in the same type."""

import math

import torch
from torch import Tensor

OUTPUT, GRADIENT, SECOND = 2, 3, 4  # how many times the plain formula's error is allowed


def assert_close(
    ours: Tensor, plain: Tensor, exact: Tensor, factor: int, name: str = "result", rows: float = 1
) -> None:
    """|ours - exact| <= factor |plain - exact| in the maximum norm, with room for one rounding of the result.

    `rows`: how many rows a place of the result sums. Where one number sums thousands, the plain formula's error is
    one draw of a random walk and may be small by luck, so there is room for such a walk of roundings.
    """
    assert ours.shape == exact.shape, f"{name}: shape {list(ours.shape)} instead of {list(exact.shape)}"
    if ours.numel() == 0:
        return
    assert torch.equal(ours.isneginf(), exact.isneginf()), f"{name}: -inf in other places"
    step = 1e-12 if ours.dtype == torch.float64 else max(1e-6, torch.finfo(ours.dtype).eps / 2)
    ours, plain, exact = (torch.where(exact.isneginf(), 0, x.double()) for x in (ours, plain, exact))
    assert not ours.isnan().any(), f"{name}: NaN in {int(ours.isnan().sum())} of {ours.numel()} places"
    error, allowed = (ours - exact).abs().max().item(), (plain - exact).abs().max().item()
    limit = factor * allowed + step * math.sqrt(max(rows, 1)) * (1 + exact.abs().max().item())
    assert error <= limit, f"{name}: error {error:.3e}, allowed {limit:.3e}"


def assert_exact(ours: Tensor, exact: Tensor, name: str = "result") -> None:
    """For float64, where the plain formula is the exact one."""
    assert ours.dtype == torch.float64, f"{name}: {ours.dtype}"
    assert_close(ours, exact, exact, OUTPUT, name)
