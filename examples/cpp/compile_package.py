"""Compiles a small model with attention ahead of time, for run_package.cpp: batch and length stay open."""

import sys

import torch
from torch import Tensor, nn

from attention_ops import attention, masks

WIDTH, HEADS = 16, 4


class Layer(nn.Module):
    """One layer of causal attention over padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # 3 x [B, H, L, D]
        out = attention(query, key, value, mask=masks.causal() & masks.padding(lengths))
        return self.out(out.transpose(1, 2).flatten(2))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Layer().eval()


def main(path: str) -> None:
    batch, length = torch.export.Dim("batch", min=1, max=1024), torch.export.Dim("length", min=1, max=4096)
    example = torch.randn(2, 6, WIDTH), torch.tensor([6, 3])
    with torch.no_grad():
        program = torch.export.export(
            model(), example, dynamic_shapes={"x": {0: batch, 1: length}, "lengths": {0: batch}}
        )
        torch._inductor.aoti_compile_and_package(program, package_path=path)


if __name__ == "__main__":
    main(sys.argv[1])
