"""A small character-level GPT, trained twice from one seed: on attention_ops and on torch's SDPA.

    python examples/train_gpt.py                 # the text is Python's own `pydoc_data.topics`
    python examples/train_gpt.py --text FILE     # any other text

The two trainings take turns, a few steps each, so that whatever else the machine does slows both
alike. At the end: a table (validation bits per character, tokens per second, memory of a training
step), a sample of generated text, and two pictures, demo/loss.png and demo/attention.png.
The exit status is 1, with a sentence, where a model learned less than a character 3-gram knows or
where the two curves part.
"""

import argparse
import dataclasses
import math
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import attention_ops
from attention_ops import masks, visualize

TRIGRAM_BITS = 2.47  # a character 3-gram (Witten-Bell) on the default text: below it, something was learned
CURVE_TOLERANCE = 0.02  # bits; the runs start equal, and what rounding adds stays below this
TURN = 20  # steps that one training does before the other has its turn
OURS, PEER = "attention_ops", "torch SDPA"


def attention_of_ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_ops.attention(query, key, value, mask=masks.causal())


def attention_of_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


ATTENTION = {OURS: attention_of_ours, PEER: attention_of_torch}


@dataclasses.dataclass(frozen=True)
class Config:
    vocabulary: int
    context: int = 128  # characters the model sees
    layers: int = 4
    heads: int = 4
    width: int = 128
    batch: int = 32
    steps: int = 420
    warmup: int = 40
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    seed: int = 0


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.heads, self.attend = config.heads, attend
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of each head: three views of one projection."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # 3 x [B, L, H, D]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # 3 x [B, H, L, D]

    def forward(self, x: Tensor) -> Tensor:
        out = self.attend(*self.heads_of(x))  # [B, H, L, D]
        return self.project(out.transpose(1, 2).flatten(2))  # [B, L, width]


class Block(nn.Module):
    def __init__(self, config: Config, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config, attend)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # [B, L, width]


class GPT(nn.Module):
    def __init__(self, config: Config, attend: Callable[[Tensor, Tensor, Tensor], Tensor], positions: nn.Module):
        """`positions` is what adds them to the embeddings, for those schemes that do."""
        super().__init__()
        self.tokens, self.positions = nn.Embedding(config.vocabulary, config.width), positions
        self.blocks = nn.ModuleList(Block(config, attend) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("project.weight", "mlp.2.weight"))
                branches = 2 * config.layers if ends_branch else 1
                nn.init.normal_(parameter, std=1 / math.sqrt(config.width * branches))

    def embed(self, text: Tensor) -> Tensor:
        return self.positions(self.tokens(text))  # [B, L, width]

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T  # [B, L, vocabulary]

    def loss(self, text: Tensor) -> Tensor:
        """Mean loss, in bits, of predicting text[:, 1:] from what stands before; text is [B, L + 1]."""
        logits = self(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()) / math.log(2)


@dataclasses.dataclass(frozen=True)
class Corpus:
    characters: str  # the vocabulary, sorted
    training: Tensor
    validation: Tensor  # the last tenth

    @staticmethod
    def of(text: str) -> "Corpus":
        characters = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(characters)}
        codes = torch.tensor([number[character] for character in text])
        cut = len(codes) * 9 // 10
        return Corpus(characters, codes[:cut], codes[cut:])

    def decode(self, codes: Tensor) -> str:
        return "".join(self.characters[code] for code in codes.tolist())


def read_text(path: pathlib.Path | None) -> str:
    if path is not None:
        return path.read_text(encoding="utf-8")
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit("train_gpt: this Python comes without pydoc_data; name a text with --text FILE")
    return "".join(topics[key] for key in sorted(topics))


def draw_batch(codes: Tensor, config: Config, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(codes) - config.context, (config.batch, 1), generator=generator)
    return codes[starts + torch.arange(config.context + 1)]  # [batch, context + 1]


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW that lets matrices decay and vectors not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    decay, betas = config.weight_decay, (0.9, 0.98)
    return torch.optim.AdamW(groups, config.learning_rate, betas, weight_decay=decay, fused=True)


def update(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """One step down the loss, by gradients of norm 1 at most."""
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = rate
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


class Training:
    """One model on its way: its batches, its losses, its clock."""

    def __init__(self, name: str, config: Config, corpus: Corpus):
        torch.manual_seed(config.seed)
        self.name, self.config, self.corpus = name, config, corpus
        self.model = GPT(config, ATTENTION[name], attention_ops.nn.LearnedPositions(config.context, config.width))
        self.batches = torch.Generator().manual_seed(config.seed)
        self.optimizer = make_optimizer(self.model, config)
        self.losses: list[float] = []
        self.validation: dict[int, float] = {}  # step -> bits per character
        self.seconds = 0.0

    def step(self) -> None:
        loss = self.model.loss(draw_batch(self.corpus.training, self.config, self.batches))
        update(self.optimizer, loss, learning_rate(len(self.losses), self.config))
        self.losses.append(loss.item())

    def turn(self, steps: int) -> None:
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.seconds += time.perf_counter() - begin

    @torch.no_grad()
    def validate(self) -> None:
        """Bits per character over the held-out text, cut into windows without overlap."""
        length = self.config.context
        text = self.corpus.validation.unfold(0, length + 1, length)  # [windows, context + 1]
        pieces = text.split(self.config.batch)
        bits = sum(self.model.loss(piece).item() * len(piece) for piece in pieces) / len(text)
        self.validation[len(self.losses)] = bits

    @property
    def tokens_per_second(self) -> float:
        return len(self.losses) * self.config.batch * self.config.context / self.seconds


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(trainings: list[Training], steps: int) -> None:
    """Both trainings in turn, TURN steps each; a look at the held-out text six times on the way."""
    look = max(TURN, steps // 6 // TURN * TURN)
    with tqdm(total=len(trainings) * steps, unit="step", mininterval=0.5) as bar:
        for begin in range(0, steps, TURN):
            count = min(TURN, steps - begin)
            for training in trainings if begin // TURN % 2 == 0 else reversed(trainings):
                training.turn(count)
                bar.update(count)
                if (begin + count) % look == 0 and begin + count < steps:
                    training.validate()
            bar.set_postfix({training.name: f"{training.losses[-1]:.2f} bits" for training in trainings})
    for training in trainings:
        training.validate()


@torch.no_grad()
def generate(training: Training, prompt: str, length: int, temperature: float = 0.7) -> str:
    corpus, config = training.corpus, training.config
    generator = torch.Generator().manual_seed(config.seed)
    codes = torch.tensor([[corpus.characters.index(character) for character in prompt]])  # [1, L]
    for _ in range(length):
        logits = training.model(codes[:, -config.context :])[:, -1] / temperature  # [1, vocabulary]
        codes = torch.cat([codes, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return corpus.decode(codes[0])


def memory(field: str) -> float:
    """A line of this process's /proc/self/status in MB: VmRSS (now) or VmHWM (its peak)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return math.nan


def measure_memory(name: str, config: Config, corpus: Corpus) -> None:
    """Print what training steps take above the model alone; runs in a process of its own."""
    training = Training(name, config, corpus)
    before = memory("VmRSS")
    for _ in range(3):
        training.step()
    print(memory("VmHWM") - before)


def step_memory(name: str, arguments: list[str]) -> float:
    """measure_memory in a fresh process, so that neither model pays for the other's pages."""
    if not pathlib.Path("/proc/self/status").exists():
        return math.nan
    command = [sys.executable, __file__, *arguments, "--memory-of", name]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def smooth(losses: list[float], window: int) -> Tensor:
    """Mean over `window` steps, [steps - window + 1]."""
    return torch.tensor(losses).unfold(0, min(window, len(losses)), 1).mean(-1)


def largest_gap(ours: Training, peer: Training) -> float:
    """Largest difference of the two smoothed training curves, in bits."""
    return (smooth(ours.losses, TURN) - smooth(peer.losses, TURN)).abs().max().item()


def print_table(trainings: list[Training], memories: dict[str, float]) -> None:
    print(f"\n{'':15}{'validation':>18}{'speed':>18}{'memory of a step':>20}")
    for training in trainings:
        bits = list(training.validation.values())[-1]
        speed, peak = training.tokens_per_second, memories[training.name]
        print(f"{training.name:15}{bits:9.3f} bits/char{speed:9,.0f} tokens/s{peak:17.0f} MB")


def draw_losses(trainings: list[Training], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for training, style in zip(trainings, ("-", "--"), strict=True):
        curve = smooth(training.losses, TURN)
        line = axes.plot(range(len(training.losses) - len(curve) + 1, len(training.losses) + 1), curve, style)[0]
        line.set_label(f"{training.name}, training")
        axes.plot(*zip(*training.validation.items(), strict=True), "o", color=line.get_color(), fillstyle="none")
    axes.plot([], [], "o", color="grey", fillstyle="none", label="held-out text")
    axes.axhline(TRIGRAM_BITS, color="grey", linewidth=0.8, label="character 3-gram")
    axes.set(xlabel="step", ylabel="bits per character", title="The same GPT on two attention operators")
    axes.set_ylim(top=min(7, axes.get_ylim()[1]))
    axes.legend()
    figure.savefig(path, dpi=120)


@torch.no_grad()
def attention_maps(training: Training, text: Tensor, layer: int) -> Tensor:
    """The weights that every head of one layer gives to a text [1, L]: [H, L, L]."""
    x = training.model.embed(text)
    for block in training.model.blocks[:layer]:
        x = block(x)
    block = training.model.blocks[layer]
    query, key, _ = block.attention.heads_of(block.norm1(x))
    return attention_ops.attention_weights(query, key, mask=masks.causal())[0]


def draw_attention(training: Training, path: pathlib.Path, length: int = 24) -> None:
    """Two heads of the first layer and two of the last, on a piece of the held-out text without line breaks."""
    config, corpus = training.config, training.corpus
    prose = re.search(rf"\w[\w ,]{{{length - 1}}}", corpus.decode(corpus.validation))
    start = prose.start() if prose else 0
    codes = corpus.validation[None, start : start + length]  # [1, L]
    layers, heads = (0, config.layers - 1), range(min(2, config.heads))
    weights = torch.cat([attention_maps(training, codes, layer)[: len(heads)] for layer in layers])  # [4, L, L]
    titles = [f"layer {layer + 1}, head {head + 1}" for layer in layers for head in heads]
    labels = [{" ": "␣", "\n": "↵"}.get(character, character) for character in training.corpus.decode(codes[0])]
    visualize.heatmap(weights, queries=labels, keys=labels, titles=titles, columns=2).savefig(path, dpi=120)


def report(trainings: list[Training], memories: dict[str, float], out: pathlib.Path) -> list[str]:
    """Print and draw everything; return what went wrong, in sentences."""
    ours, peer = trainings
    print_table(trainings, memories)
    gap = largest_gap(ours, peer)
    first = max(abs(a - b) for a, b in zip(ours.losses[:10], peer.losses[:10], strict=True))
    print(f"\nThe curves differ by {first:.1e} bits at most in the first ten steps, by {gap:.1e} (smoothed) in all.")
    print(f"\nA sample of {ours.name}:\n" + "-" * 80)
    print(generate(ours, "The ", 400) + "\n" + "-" * 80)
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(trainings, out / "loss.png")
    draw_attention(ours, out / "attention.png")
    print(f"Pictures: {out / 'loss.png'}, {out / 'attention.png'}")
    wrong = []
    for training in trainings:
        bits = list(training.validation.values())[-1]
        if bits >= TRIGRAM_BITS:
            wrong.append(f"{training.name} reached {bits:.2f} bits per character; a 3-gram has {TRIGRAM_BITS}")
    if gap > CURVE_TOLERANCE:
        wrong.append(f"the curves are {gap:.3f} bits apart; rounding explains {CURVE_TOLERANCE}")
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", type=pathlib.Path, help="a text file to learn (UTF-8)")
    parser.add_argument("--steps", type=int, default=Config.steps, help=f"training steps ({Config.steps})")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps; checks only the curves")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo"), help="folder of the pictures (demo)")
    parser.add_argument("--memory-of", choices=list(ATTENTION), help=argparse.SUPPRESS)
    return parser.parse_args()


def configure(arguments: argparse.Namespace, corpus: Corpus) -> Config:
    vocabulary = len(corpus.characters)
    if arguments.quick:
        return Config(vocabulary, context=32, layers=2, heads=2, width=32, batch=8, steps=16, warmup=4)
    return Config(vocabulary, steps=arguments.steps)


def main() -> None:
    arguments = parse_arguments()
    corpus = Corpus.of(read_text(arguments.text))
    config = configure(arguments, corpus)
    if arguments.memory_of:
        return measure_memory(arguments.memory_of, config, corpus)
    passed_on = ["--text", str(arguments.text)] if arguments.text else []
    if arguments.quick:
        passed_on.append("--quick")
    memories = {name: step_memory(name, passed_on) for name in ATTENTION}
    trainings = [Training(name, config, corpus) for name in ATTENTION]
    parameters = sum(p.numel() for p in trainings[0].model.parameters())
    sizes = len(corpus.training), len(corpus.validation), parameters
    print("{:,} characters to learn, {:,} held out; {:,} parameters".format(*sizes))
    train(trainings, config.steps)
    wrong = report(trainings, memories, arguments.out)
    judged = [line for line in wrong if not (arguments.quick and "3-gram" in line)]
    if judged:
        sys.exit("train_gpt: " + "; ".join(judged))


if __name__ == "__main__":
    main()
