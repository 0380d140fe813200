"""Copper clusters: attention learns a many-body potential from energies and forces, the gradient being in the loss.

    python examples/force_matching.py            # two to three minutes on one thread
    python examples/force_matching.py --quick    # seconds; a model that has barely learned

The truth is the Gupta potential, a many-body potential of metals; Langevin dynamics draws its clusters. In the model
the bias of each head is the logarithm of a Gaussian of the distance, whose centre, width and height are learned: the
head looks at neighbours at about that distance. Forces are -dE/dx, taken with create_graph=True, so that training
differentiates the attention and its bias twice.

Prints the errors on clusters not seen in training, what a permutation, a shift and a rotation do to the energy, the
forces beside difference quotients of the energy, and the same step on torch's SDPA; draws demo/force_matching.png.
The exit status is 1, with a sentence, where one of these is not as it should be.
"""

import copy
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from comparison import OURS, PEER, Step, attention_of_torch, compare, largest_difference, parse, print_peak, verify
from copper import NEAREST, Clusters, forces_of, gupta, lattice_balls
from torch import Tensor, nn
from tqdm import tqdm

import attention_ops


def attention_of_ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """The sink, a logit 0, lets a weight tell how many neighbours there are, not only which share each has."""
    return attention_ops.attention(query, key, value, bias=bias, sinks=query.new_zeros(query.shape[1]))


def attention_of_peer(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Here the sink is one more key, of zeros."""
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return attention_of_torch(query, key, value, F.pad(bias, (0, 1)))


ATTENTION = {OURS: attention_of_ours, PEER: attention_of_peer}


@dataclasses.dataclass(frozen=True)
class Config:
    atoms: int = 64
    chains: int = 32  # clusters to start the dynamics with; a quarter as many more are held out
    settle: int = 100  # steps before the first snapshot
    snapshots: int = 10  # of each
    layers: int = 2
    heads: int = 8
    width: int = 64
    batch: int = 8
    steps: int = 1500
    learning_rate: float = 5e-3
    seed: int = 0


def distances(x: Tensor) -> Tensor:
    """[B, N, 3] -> [B, 1, N, N], smooth at 0 (torch.cdist has no second derivative)."""
    return ((x[:, :, None] - x[:, None]).square().sum(-1) + 1e-6).sqrt()[:, None]


class Layer(nn.Module):
    def __init__(self, config: Config, attend: Callable[..., Tensor]):
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 2 * config.width), nn.SiLU(), nn.Linear(2 * config.width, config.width)
        )
        self.centre = nn.Parameter(torch.linspace(0.7, 1.8, config.heads)[:, None, None])  # in NEAREST
        self.sharpness = nn.Parameter(torch.full((config.heads, 1, 1), 20.0))  # half the inverse squared width
        self.level = nn.Parameter(torch.full((config.heads, 1, 1), -3.0))

    def forward(self, x: Tensor, distance: Tensor, squared: Tensor) -> Tensor:
        """x [B, N, width], distances [B, 1, N, N]."""
        a, b, c = self.sharpness, self.centre, self.level
        bias = c - a * b.square() + 2 * a * b * distance - a * squared  # level - sharpness (distance - centre)²
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x [B, H, N, D]
        x = x + self.project(self.attend(query, key, value, bias).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Potential(nn.Module):
    def __init__(self, config: Config, attend: Callable[..., Tensor], level: float):
        super().__init__()
        self.level = level  # eV per atom
        self.atom = nn.Parameter(torch.randn(config.width))  # every atom starts as the same vector
        self.layers = nn.ModuleList(Layer(config, attend) for _ in range(config.layers))
        self.energy = nn.Sequential(nn.Linear(config.width, config.width), nn.SiLU(), nn.Linear(config.width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Energies [B] in eV of clusters [B, N, 3] in Å."""
        distance = distances(x / NEAREST)
        squared = distance.square()
        atoms = self.atom.expand(*x.shape[:2], -1)
        for layer in self.layers:
            atoms = layer(atoms, distance, squared)
        return (self.energy(atoms).squeeze(-1) + self.level).sum(-1)


def make_potential(name: str, config: Config, level: float = 0.0) -> Potential:
    torch.manual_seed(config.seed)
    return Potential(config, ATTENTION[name], level)


def loss_of(model: Potential, batch: Clusters, scale: Clusters) -> tuple[Tensor, Tensor]:
    """The loss, and its part for forces: mean squares of the errors over those of guessing the mean."""
    energy, forces = forces_of(model, batch.x, train=True)
    of_forces = (forces - batch.forces).square().mean() / scale.forces.square().mean()
    of_energy = (energy - batch.energy).square().mean() / scale.energy.var()
    return of_forces + 0.1 * of_energy, of_forces


def gradients(model: Potential, batch: Clusters, scale: Clusters) -> list[Tensor]:
    """A training step but for the optimizer's part."""
    return list(torch.autograd.grad(loss_of(model, batch, scale)[0], list(model.parameters())))


def train(model: Potential, data: Clusters, config: Config) -> list[float]:
    """The relative error of the forces at every step."""
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps)
    random, errors = torch.Generator().manual_seed(config.seed), []
    for _ in (bar := tqdm(range(config.steps), unit="step", mininterval=0.5)):
        chosen = torch.randint(len(data.x), (config.batch,), generator=random)
        loss, of_forces = loss_of(model, data[chosen], data)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        errors.append(of_forces.sqrt().item())
        bar.set_postfix_str(f"force error {errors[-1]:.2f}", refresh=False)
    return errors


def symmetry_errors(model: Potential, x: Tensor) -> dict[str, float]:
    """How much moves that leave the physics alone change the energy of x [B, N, 3], in eV; the model in float64."""
    energy = model(x)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=x.dtype))[0]
    rotation = rotation * rotation.det()  # no mirror
    moved = {"permutation": x[:, torch.randperm(x.shape[1])], "shift": x + 5.0, "rotation": x @ rotation}
    return {name: (model(y) - energy).abs().max().item() for name, y in moved.items()}


def difference_error(model: Potential, x: Tensor, step: float = 1e-5) -> float:
    """Largest error of the force along a random direction against a difference quotient, relative; in float64."""
    along = torch.randn_like(x)
    quotient = -(model(x + step * along) - model(x - step * along)) / (2 * step)
    force = (forces_of(model, x)[1] * along).sum((1, 2))
    return ((force - quotient).abs().max() / force.abs().max()).item()


def draw(errors: list[float], predicted: Tensor, truth: Tensor, path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = min(20, len(errors))
    left.plot(range(window, len(errors) + 1), torch.tensor(errors).unfold(0, window, 1).mean(-1))
    left.axhline(1, color="grey", linewidth=0.8, label="the guess 0")
    left.set(xlabel="step", ylabel="force error / RMS force", yscale="log", title="training")
    left.legend()
    ends = [truth.min().item(), truth.max().item()]
    right.plot(ends, ends, color="grey", linewidth=0.8)
    right.plot(truth.flatten(), predicted.flatten(), ".", markersize=2, alpha=0.3)
    right.set(xlabel="true force, eV/Å", ylabel="the model's force, eV/Å", title="clusters not seen in training")
    figure.savefig(path, dpi=120)


def report(model: Potential, held_out: Clusters, errors: list[float], out: pathlib.Path) -> float:
    """Print and draw what was learned; returns the relative error of the forces."""
    energy, forces = forces_of(model, held_out.x)
    error, size = ((f.square().mean().sqrt().item()) for f in (forces - held_out.forces, held_out.forces))
    off, atoms = (energy.detach() - held_out.energy).square().mean().sqrt().item(), held_out.x.shape[1]
    spread = held_out.energy.std().item()
    print(f"forces:   RMS error {error:.3f} eV/Å; guessing zero has {size:.3f} eV/Å")
    print(f"energies: RMS error {1000 * off / atoms:.1f} meV/atom; guessing the mean has {1000 * spread / atoms:.1f}")
    draw(errors, forces, held_out.forces, out / "force_matching.png")
    return error / size


def check(model: Potential, config: Config, data: Clusters) -> list[str]:
    """What must hold whatever was learned; returns what does not, in sentences."""
    exact, x = copy.deepcopy(model).double(), data.x[:4].double()
    batch = Clusters(x, data.energy[:4].double(), data.forces[:4].double())
    twin = make_potential(PEER, config, exact.level).double()
    twin.load_state_dict(exact.state_dict())
    found = {f"{name}: the energy moves, eV, by": e for name, e in symmetry_errors(exact, x).items()}
    found["forces differ from quotients of the energy, relative, by"] = difference_error(exact, x)
    steps = [functools.partial(gradients, m, batch, batch) for m in (exact, twin)]
    found["gradients of training differ from those by torch's SDPA, relative, by"] = largest_difference(*steps)
    return verify(found)


def step_of(config: Config, count: int, atoms: int, name: str) -> Step:
    """On `count` clusters cut from the lattice."""
    x = lattice_balls(count, atoms, torch.Generator().manual_seed(config.seed))
    batch = Clusters(x, *forces_of(gupta, x))
    return functools.partial(gradients, make_potential(name, config), batch, batch)


def main() -> None:
    arguments = parse(__doc__.split("\n", 1)[0], Config.steps)
    config = Config(steps=arguments.steps)
    if arguments.quick:
        config = Config(atoms=16, chains=8, settle=25, snapshots=2, batch=4, steps=60)
    make = functools.partial(step_of, config)
    if arguments.memory_of:
        return print_peak(make, *arguments.memory_of)
    drawn = config.atoms, config.settle, config.snapshots
    data, held_out = Clusters.draw(config.chains, *drawn, seed=1), Clusters.draw(config.chains // 4, *drawn, seed=2)
    model = make_potential(OURS, config, (data.energy.mean() / config.atoms).item())
    errors = train(model, data, config)
    error = report(model, held_out, errors, arguments.out)
    wrong = check(model, config, data)
    compare(make, [(config.batch, config.atoms), (2, 8 * config.atoms)], "atoms", arguments.quick)
    if error > (0.9 if arguments.quick else 0.15):
        wrong.append(f"the force error is {error:.2f} of what guessing 0 has")
    if wrong:
        sys.exit("force_matching: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
