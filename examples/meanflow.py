"""Flowers from noise in one step: MeanFlow, whose loss holds a derivative of the network along the flow.

    python examples/meanflow.py            # two to three minutes on one thread
    python examples/meanflow.py --quick    # seconds; a network that has barely learned

A sample is a closed curve of points with 3 or 5 petals, turned at random; all points must agree on both, and only
attention connects them. The transformer u(z, r, t) is the mean velocity of the flow from noise (t = 1) to data
(t = 0) between the times r and t. It obeys u = v - (t - r) du/dt, where v is the velocity at t and du/dt the
derivative along (v, 0, 1), which `torch.func.jvp` takes through the attention; the loss pulls u to the right side, held
fixed. Then noise - u(noise, 0, 1) is a sample.

Prints how much of the radius of samples is petals, how many petals they have, the jvp beside a difference quotient, and
the same step on torch's SDPA; draws demo/meanflow.png.

Geng et al., Mean Flows for One-step Generative Modeling, 2025, https://arxiv.org/abs/2505.13447.
"""

import copy
import dataclasses
import functools
import math
import pathlib
import sys
import typing
from collections.abc import Callable

import torch
from comparison import OURS, PEER, Step, attention_of_torch, compare, largest_difference, parse, print_peak, verify
from torch import Tensor, nn
from torch.func import jvp
from tqdm import tqdm

import attention_ops

PETALS = (3, 5)
ATTENTION = {OURS: attention_ops.attention, PEER: attention_of_torch}


@dataclasses.dataclass(frozen=True)
class Config:
    points: int = 64
    layers: int = 2
    heads: int = 4
    width: int = 64
    batch: int = 32
    steps: int = 1200
    learning_rate: float = 6e-3
    at_once: float = 0.5  # how often r = t, where u is the velocity itself
    averaging: float = 0.99  # of the weights, for sampling
    seed: int = 0


def angles(points: int) -> Tensor:
    return torch.arange(points) * (2 * math.pi / points)


def flowers(count: int, points: int, random: torch.Generator) -> Tensor:
    """[count, points, 2]: radius 1 + 0.5 cos(petals (angle - turn)), and a jitter of 0.02."""
    petals = torch.tensor(PETALS)[torch.randint(len(PETALS), (count, 1), generator=random)]
    turn = 2 * math.pi * torch.rand(count, 1, generator=random)
    angle = angles(points)
    radius = 1 + 0.5 * (petals * (angle - turn)).cos()
    x = radius[..., None] * torch.stack([angle.cos(), angle.sin()], -1)
    return x + 0.02 * torch.randn(x.shape, generator=random)


def petals_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The number of petals of each curve, [count], and which part of its radius' variance they are."""
    power = torch.fft.rfft(x.norm(dim=-1)).abs().square()[:, 1:]  # [count, harmonics 1, 2, ...]
    part, which = (power[:, [p - 1 for p in PETALS]] / power.sum(-1, keepdim=True)).max(-1)
    return torch.tensor(PETALS)[which], part


def embedding(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, config: Config, attend: Callable[..., Tensor]):
        super().__init__()
        width, self.heads, self.attend = config.width, config.heads, attend
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.modulate = nn.Linear(width, 4 * width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """x [B, L, width], times [B, 1, width]."""
        scale1, shift1, scale2, shift2 = self.modulate(times).chunk(4, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        query, key, value = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # 3 x [B, H, L, D]
        x = x + self.project(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class MeanVelocity(nn.Module):
    def __init__(self, config: Config, attend: Callable[..., Tensor]):
        super().__init__()
        waves = torch.arange(1, 9)[:, None] * angles(config.points)  # which point of the curve a token is
        self.register_buffer("places", torch.cat([waves.cos(), waves.sin()]).T)  # [L, 16]
        self.points, self.times = embedding(2 + 16, config.width), embedding(16, config.width)
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.out = nn.Sequential(nn.LayerNorm(config.width), nn.Linear(config.width, 2))

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """z [B, L, 2] at the times t [B, 1, 1] -> the mean velocity [B, L, 2] between r and t."""
        waves = torch.cat([t, t - r], -1)[..., None] * torch.arange(1, 5, dtype=z.dtype)  # [B, 1, 2, 4]
        times = self.times(torch.cat([waves.cos(), waves.sin()], -1).flatten(2))  # [B, 1, width]
        x = self.points(torch.cat([z, self.places.expand(*z.shape[:-1], -1)], -1))
        for block in self.blocks:
            x = block(x, times)
        return self.out(x)


class Batch(typing.NamedTuple):
    z: Tensor  # [B, L, 2], between data and noise
    velocity: Tensor  # [B, L, 2], noise - data
    r: Tensor  # [B, 1, 1]
    t: Tensor  # [B, 1, 1], at least r

    @staticmethod
    def draw(config: Config, random: torch.Generator) -> "Batch":
        data = flowers(config.batch, config.points, random)
        noise = torch.randn(data.shape, generator=random)
        r, t = (torch.randn(2, config.batch, 1, 1, generator=random) - 0.4).sigmoid().sort(0).values
        r = torch.where(torch.rand(r.shape, generator=random) < config.at_once, t, r)
        return Batch((1 - t) * data + t * noise, noise - data, r, t)


def along_the_flow(model: MeanVelocity, batch: Batch) -> tuple[Tensor, Tensor]:
    """u and du/dt, both [B, L, 2]: z moves with its velocity, r stands, t runs."""
    direction = batch.velocity, torch.zeros_like(batch.r), torch.ones_like(batch.t)
    return jvp(model, (batch.z, batch.r, batch.t), direction)


def mean_flow_loss(model: MeanVelocity, batch: Batch, held: bool = True) -> Tensor:
    """Training holds the target; else the gradient goes through du/dt too, which is reverse mode over forward mode."""
    u, du = along_the_flow(model, batch)
    target = batch.velocity - (batch.t - batch.r) * du
    return (u - (target.detach() if held else target)).square().mean()


def make_velocity(name: str, config: Config) -> MeanVelocity:
    torch.manual_seed(config.seed)
    return MeanVelocity(config, ATTENTION[name])


def gradients(model: MeanVelocity, batch: Batch, held: bool = True) -> list[Tensor]:
    """A training step but for the optimizer's part."""
    return list(torch.autograd.grad(mean_flow_loss(model, batch, held), list(model.parameters())))


def train(model: MeanVelocity, config: Config) -> MeanVelocity:
    """Trains the model and returns the mean of its weights over the last steps, which samples better."""
    averaged, random = copy.deepcopy(model), torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.learning_rate, total_steps=config.steps)
    for _ in (bar := tqdm(range(config.steps), unit="step", mininterval=0.5)):
        loss = mean_flow_loss(model, Batch.draw(config, random))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(averaged.parameters()), list(model.parameters()), 1 - config.averaging)
        bar.set_postfix_str(f"error {loss.item():.3f}", refresh=False)
    return averaged


def difference_error(model: MeanVelocity, batch: Batch, step: float = 1e-5) -> float:
    """Largest error of du/dt by jvp against a difference quotient, relative; in float64."""
    (z, v, r, t), du = batch, along_the_flow(model, batch)[1]
    quotient = (model(z + step * v, r, t + step) - model(z - step * v, r, t - step)) / (2 * step)
    return ((du - quotient).abs().max() / du.abs().max()).item()


def check(model: MeanVelocity, config: Config) -> list[str]:
    """What must hold whatever was learned; returns what does not, in sentences."""
    drawn = Batch.draw(dataclasses.replace(config, batch=4), torch.Generator().manual_seed(config.seed))
    batch = Batch(*(x.double() for x in drawn))
    exact, twin = copy.deepcopy(model).double(), make_velocity(PEER, config).double()
    twin.load_state_dict(exact.state_dict())
    found = {"du/dt by jvp differs from a quotient, relative, by": difference_error(exact, batch)}
    for name, held in (("of training", True), ("through du/dt", False)):
        steps = [functools.partial(gradients, m, batch, held) for m in (exact, twin)]
        found[f"gradients {name} differ from those by torch's SDPA, relative, by"] = largest_difference(*steps)
    return verify(found)


def draw_curves(data: Tensor, samples: Tensor, path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4), layout="constrained")
    shown = {"data": data, "samples, one step from noise": samples}
    for half, (title, curves) in zip(figure.subfigures(1, 2), shown.items(), strict=True):
        half.suptitle(title)
        for axes, x in zip(half.subplots(4, 4).flat, curves[:16], strict=True):
            axes.plot(*torch.cat([x, x[:1]]).T, ".-", markersize=3, linewidth=0.8)
            axes.set(xlim=(-1.8, 1.8), ylim=(-1.8, 1.8), aspect="equal", xticks=[], yticks=[])
    figure.savefig(path, dpi=120)


def report(model: MeanVelocity, config: Config, out: pathlib.Path) -> tuple[float, float]:
    """Print and draw what was learned; returns the samples' mean radius and which part of its variance is petals."""
    random = torch.Generator().manual_seed(config.seed + 1)
    data, noise = flowers(512, config.points, random), torch.randn(512, config.points, 2, generator=random)
    with torch.no_grad():
        samples = noise - model(noise, torch.zeros(512, 1, 1), torch.ones(512, 1, 1))
    shown = {"noise": noise, "samples": samples, "data": data}
    print(f"{'':9}{'radius':>16}{'petals, of its variance':>26}   curves with {PETALS} petals")
    for name, x in shown.items():
        which, part = petals_of(x)
        shares = " ".join(f"{100 * (which == p).float().mean():4.0f} %" for p in PETALS)
        radius = x.norm(dim=-1)
        print(f"{name:9}{radius.mean():9.2f} ± {radius.std():.2f}{100 * part.mean():24.0f} %   {shares}")
    draw_curves(data, samples, out / "meanflow.png")
    return samples.norm(dim=-1).mean().item(), petals_of(samples)[1].mean().item()


def step_of(config: Config, count: int, points: int, name: str) -> Step:
    config = dataclasses.replace(config, batch=count, points=points)
    batch = Batch.draw(config, torch.Generator().manual_seed(config.seed))
    return functools.partial(gradients, make_velocity(name, config), batch)


def main() -> None:
    arguments = parse(__doc__.split("\n", 1)[0], Config.steps)
    config = Config(steps=arguments.steps)
    if arguments.quick:
        config = Config(points=32, width=32, batch=16, steps=60, averaging=0.9)
    make = functools.partial(step_of, config)
    if arguments.memory_of:
        return print_peak(make, *arguments.memory_of)
    model = train(make_velocity(OURS, config), config)
    radius, part = report(model, config, arguments.out)
    wrong = check(model, config)
    sizes = [(config.batch, config.points), (config.batch // 4, 8 * config.points)]
    compare(make, sizes, "points", arguments.quick)
    if abs(radius - 1) > 0.2:
        wrong.append(f"the samples' mean radius is {radius:.2f}; the data's is 1")
    if part < 0.5 and not arguments.quick:
        wrong.append(f"petals are {100 * part:.0f} % of the variance of the samples' radius")
    if wrong:
        sys.exit("meanflow: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
