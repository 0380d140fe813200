"""Clusters of copper atoms for force_matching.py: a many-body potential and clusters that obey it."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

# Copper in the second-moment approximation (Cleri and Rosato, Phys. Rev. B 48, 22, 1993): eV, Å.
REPULSION, BINDING, P, Q, NEAREST = 0.0855, 1.224, 10.960, 2.278, 2.556
BOLTZMANN = 8.617e-5  # eV/K


def gupta(x: Tensor) -> Tensor:
    """The true energies in eV, [B], of clusters [B, N, 3] in Å: pairs repel, the root of a sum over pairs binds."""
    stretch = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") / NEAREST - 1
    stretch = stretch + 1e3 * torch.eye(x.shape[1], dtype=x.dtype)  # no atom sees itself
    repulsion = REPULSION * (-P * stretch).exp().sum(-1)
    binding = BINDING * (-2 * Q * stretch).exp().sum(-1).sqrt()
    return (repulsion - binding).sum(-1)


def forces_of(energy: Callable[[Tensor], Tensor], x: Tensor, train: bool = False) -> tuple[Tensor, Tensor]:
    """Energies [B] and forces -dE/dx [B, N, 3]; with `train` the forces can be differentiated too."""
    x = x.detach().requires_grad_()
    total = energy(x)
    return total, -torch.autograd.grad(total.sum(), x, create_graph=train)[0]


def lattice_balls(count: int, atoms: int, random: torch.Generator) -> Tensor:
    """The atoms nearest to random places of copper's fcc lattice, [count, atoms, 3]."""
    cells = torch.cartesian_prod(*[torch.arange(-8.0, 9.0)] * 3)
    lattice = cells[cells.sum(-1) % 2 == 0] * NEAREST / math.sqrt(2)
    lattice = lattice - torch.rand(count, 1, 3, generator=random) * NEAREST  # [count, sites, 3]
    nearest = lattice.norm(dim=-1).topk(atoms, largest=False).indices
    return lattice.gather(1, nearest[..., None].expand(-1, -1, 3))


def langevin(x: Tensor, settle: int, snapshots: int, random: torch.Generator) -> Tensor:
    """Overdamped dynamics of each cluster at 300 to 1500 K; after `settle` steps a snapshot every 25."""
    kelvin = torch.linspace(300, 1500, len(x))[torch.randperm(len(x), generator=random), None, None]
    step, kept = 0.01, []  # Å²/eV
    for n in range(settle + 25 * snapshots):
        noise = torch.randn(x.shape, generator=random)
        x = x + step * forces_of(gupta, x)[1] + (2 * BOLTZMANN * kelvin * step).sqrt() * noise
        if n >= settle and n % 25 == 0:
            kept.append(x)
    return torch.cat(kept)


@dataclasses.dataclass(frozen=True)
class Clusters:
    x: Tensor  # [count, N, 3], Å
    energy: Tensor  # [count], eV
    forces: Tensor  # [count, N, 3], eV/Å

    @staticmethod
    def draw(chains: int, atoms: int, settle: int, snapshots: int, seed: int) -> "Clusters":
        random = torch.Generator().manual_seed(seed)
        x = langevin(lattice_balls(chains, atoms, random), settle, snapshots, random)
        energy, forces = forces_of(gupta, x)
        return Clusters(x, energy.detach(), forces)

    def __getitem__(self, index: Tensor | slice) -> "Clusters":
        return Clusters(self.x[index], self.energy[index], self.forces[index])
