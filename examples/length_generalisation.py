"""Trained at length 64, tested at up to 1024: one small GPT with each position scheme, and with none.

    python examples/length_generalisation.py             # all of it
    python examples/length_generalisation.py --quick     # smaller models, less training, lengths to 256
    python examples/length_generalisation.py --schemes ALiBi T5 --tasks text --json FILE

Three tasks: real text (the next character; bits per character over all places), copying the symbol four places before,
and recall (four keys and their values, a stretch of noise as long as the text allows, the keys again; accuracy). Prints
a table for each and draws demo/length_generalisation.png.

What our runs showed (1000 steps, one seed), most of it as the papers have it:
- On text ALiBi, KERPLE and Transformer-XL read 1024 characters as well as 64, or better. Shaw's rows nearly hold. T5's
  buckets and a clipped bias hold to 128 and then lose, since nothing in them falls any further: the more far keys
  there are, the more weight they have together. Sinusoids and a learned table break at once, RoPE beyond 128. Of RoPE's
  scalings, without training at the new length, linear is worse than none; dynamic NTK and YaRN hold to 128 and put the
  rest off. Without positions a model starts badly and loses slowly.
- Copying needs one exact distance. Shaw, Transformer-XL and KERPLE power find it at all lengths, KERPLE log nearly;
  RoPE, T5 and the clipped bias lose it in a crowd; ALiBi, whose scores fall by fixed slopes, never quite has it. A
  learned table finds nothing beyond 64, and a model without positions has hardly anything to go by.
- Recall goes by content. T5, KERPLE log, the clipped bias, Shaw and RoPE with YaRN keep it whole to 1024, sinusoids and
  ALiBi nearly; Transformer-XL loses part of it (more in one run than in another), RoPE and its other scalings most. The
  learned table, KERPLE power and the model without positions had not learned it in 1000 steps.

A learned table refuses places past its end; here it is interpolated because the script asks for that. To add a scheme,
add a line to SCHEMES. The exit status is 1, with a sentence, where a scheme did not do on text what is said above.
"""

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from train_gpt import GPT, Config, Corpus, draw_batch, learning_rate, make_optimizer, read_text, update

from attention_ops import attention, masks, rotary
from attention_ops import nn as ops_nn

TRAINED, LENGTHS = 64, (64, 128, 256, 512, 1024)
IGNORED = -100  # a target that nobody asks for; cross_entropy's own
SYMBOLS, BACK = 16, 4  # of copying: the alphabet, and how far back
KEYS, PAIRS = 8, 4  # of recall: as many values and as much noise as keys
TESTED = 64  # texts of the greatest length; shorter ones are more
Results = dict[str, dict[str, dict[int, float]]]  # task -> scheme -> length -> score
COLOURS = [*(f"C{n}" for n in range(10)), "black"]
HOLDS, BREAKS = ("ALiBi", "KERPLE log", "KERPLE power", "Transformer-XL"), ("sinusoidal", "learned", "RoPE")  # on text


class Attend(nn.Module):
    """Causal attention with what one module of `attention_ops.nn` does to query, key and scores."""

    def __init__(self, places: nn.Module | None):
        super().__init__()
        self.places = places

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        lengths, options = (query.shape[-2], key.shape[-2]), {}
        match self.places:
            case ops_nn.RotaryEmbedding() as rotate:
                query, key = rotate(query), rotate(key)
            case ops_nn.DistanceBias() as bias:
                options = {"distance_bias": bias.distance_bias(*lengths)}
            case ops_nn.ShawPositions() as shaw:
                options = shaw(*lengths)
            case ops_nn.TransformerXLPositions() as xl:
                query, options = xl(query, lengths[1])
        return attention(query, key, value, mask=masks.causal(), **options)


def model_of(config: Config, places: nn.Module | None = None, add: Callable[[Tensor], Tensor] | None = None) -> GPT:
    """A GPT with positions in attention, of which all layers share the parameters, or added to its embeddings."""
    return GPT(config, Attend(places), add or nn.Identity())


def sinusoidal(config: Config) -> GPT:
    add = ops_nn.SinusoidalPositions(config.width)
    return model_of(config, add=lambda x: add(x * math.sqrt(config.width)))  # as Vaswani et al. weigh the two


def learned(config: Config) -> GPT:
    return model_of(config, add=ops_nn.LearnedPositions(config.context, config.width))


def rotating(config: Config) -> GPT:
    return model_of(config, ops_nn.RotaryEmbedding())


def interpolated(model: GPT, length: int) -> None:
    """The table itself refuses positions past its end."""
    model.positions = model.positions.resized(length)


def scaled(scaling: Callable[[float], rotary.Scaling]) -> Callable[[GPT, int], None]:
    """By the factor of the lengths."""

    def lengthen(model: GPT, length: int) -> None:
        for block in model.blocks:
            block.attention.attend.places = ops_nn.RotaryEmbedding(scaling=scaling(length / TRAINED))

    return lengthen


@dataclasses.dataclass(frozen=True)
class Scheme:
    make: Callable[[Config], GPT]  # schemes that make the same model share its training
    lengthen: Callable[[GPT, int], None] = lambda model, length: None  # changes a trained model for a longer text


SCHEMES = {
    "none": Scheme(model_of),
    "sinusoidal": Scheme(sinusoidal),
    "learned": Scheme(learned, interpolated),
    "RoPE": Scheme(rotating),
    "RoPE linear": Scheme(rotating, scaled(rotary.Linear)),
    "RoPE NTK": Scheme(rotating, scaled(lambda factor: rotary.DynamicNTK(1.0, TRAINED))),
    "RoPE YaRN": Scheme(rotating, scaled(lambda factor: rotary.YaRN(factor, TRAINED))),
    "ALiBi": Scheme(lambda c: model_of(c, ops_nn.AlibiBias(c.heads))),
    "T5": Scheme(lambda c: model_of(c, ops_nn.T5Bias(c.heads, buckets=16, max_distance=32, bidirectional=False))),
    "KERPLE log": Scheme(lambda c: model_of(c, ops_nn.KerpleBias(c.heads))),
    "KERPLE power": Scheme(lambda c: model_of(c, ops_nn.KerpleBias(c.heads, "power"))),
    "clipped": Scheme(lambda c: model_of(c, ops_nn.ClippedBias(c.heads, reach=16))),
    "Shaw": Scheme(lambda c: model_of(c, ops_nn.ShawPositions(c.width // c.heads, reach=16))),
    "Transformer-XL": Scheme(lambda c: model_of(c, ops_nn.TransformerXLPositions(c.heads, c.width // c.heads))),
}


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none") / math.log(2)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).float()


@dataclasses.dataclass(frozen=True)
class Task:
    """`draw` and `test` give inputs and targets, both [count, length]; targets may be IGNORED."""

    vocabulary: int
    measure: str
    score: Callable[[Tensor, Tensor], Tensor]  # of logits [n, vocabulary] and targets [n]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]  # so many of the trained length
    test: Callable[[int, int], tuple[Tensor, Tensor]]  # so many tokens, in texts of such a length


def reading(corpus: Corpus, longest: int) -> Task:
    """The next character. Every length has the same held-out characters, cut into windows without overlap."""
    held_out = corpus.validation[: (len(corpus.validation) - 1) // longest * longest + 1]
    if len(held_out) == 1:
        sys.exit(f"length_generalisation: expected a text of {10 * longest + 10} characters or more")

    def draw(count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
        config = Config(len(corpus.characters), TRAINED, batch=count)
        text = draw_batch(corpus.training, config, random)  # [count, length + 1]
        return text[:, :-1], text[:, 1:]

    def test(tokens: int, length: int) -> tuple[Tensor, Tensor]:
        text = held_out[: tokens + 1].unfold(0, length + 1, length)
        return text[:, :-1], text[:, 1:]

    return Task(len(corpus.characters), "bits per character", bits, draw, test)


def drawn(
    vocabulary: int,
    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]],
    draw_test: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]] | None = None,
) -> Task:
    """A task whose texts are drawn at random, with any length."""

    def test(tokens: int, length: int) -> tuple[Tensor, Tensor]:
        return (draw_test or draw)(tokens // length, length, torch.Generator().manual_seed(length))

    return Task(vocabulary, "accuracy", accuracy, lambda count, random: draw(count, TRAINED, random), test)


def copying(count: int, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """The symbol that stands BACK places before."""
    inputs = torch.randint(SYMBOLS, (count, length), generator=random)
    return inputs, F.pad(inputs[:, :-BACK], (BACK, 0), value=IGNORED)


def recall(count: int, length: int, random: torch.Generator, rounds: int = 1) -> tuple[Tensor, Tensor]:
    """Keys with their values, noise, the same keys in another order, once or more: which were their values?"""
    keys = torch.rand(count, KEYS, generator=random).argsort(1)[:, :PAIRS]
    order = torch.rand(count, rounds, PAIRS, generator=random).argsort(2).flatten(1)
    values = torch.randint(KEYS, (count, PAIRS), generator=random)
    noise = torch.randint(KEYS, (count, length - 2 * PAIRS * (1 + rounds)), generator=random)
    pairs = torch.stack([keys, KEYS + values], -1)  # [count, PAIRS, 2]
    asked = pairs.gather(1, order[..., None].expand(-1, -1, 2))  # [count, rounds * PAIRS, 2]
    targets = torch.full((count, length), IGNORED)
    targets[:, length - 2 * PAIRS * rounds :: 2] = asked[..., 1]
    return torch.cat([pairs.flatten(1), 2 * KEYS + noise, asked.flatten(1)], 1), targets


def make_tasks(corpus: Corpus, longest: int) -> dict[str, Task]:
    return {
        "text": reading(corpus, longest),
        "copying": drawn(SYMBOLS, copying),
        "recall": drawn(3 * KEYS, functools.partial(recall, rounds=3), recall),
    }


def asked(model: GPT, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] and targets [n] where there are targets."""
    places = targets != IGNORED
    return model(inputs)[places], targets[places]


def train(make: Callable[[Config], GPT], task: Task, config: Config, bar: tqdm) -> GPT:
    torch.manual_seed(config.seed)
    model, random = make(config), torch.Generator().manual_seed(config.seed)
    optimizer = make_optimizer(model, config)
    for step in range(config.steps):
        loss = bits(*asked(model, *task.draw(config.batch, random))).mean()
        update(optimizer, loss, learning_rate(step, config))
        bar.update()
    return model


@torch.no_grad()
def score(scheme: Scheme, model: GPT, task: Task, tokens: int, length: int) -> float:
    """The task's measure, a mean over all places of all texts."""
    if length > TRAINED:
        model = copy.deepcopy(model)
        scheme.lengthen(model, length)
    pieces = zip(*(x.split(max(1, 4096 // length)) for x in task.test(tokens, length)), strict=True)
    return torch.cat([task.score(*asked(model, *piece)) for piece in pieces]).mean().item()


def run(tasks: dict[str, Task], names: list[str], config: Config, lengths: tuple[int, ...]) -> Results:
    """Trains each model once for each task, and scores all schemes that it has."""
    makers = list(dict.fromkeys(SCHEMES[name].make for name in names))
    results: Results = {task: {name: {} for name in names} for task in tasks}
    steps = len(tasks) * (len(makers) * config.steps + len(names) * len(lengths))
    with tqdm(total=steps, unit="step", mininterval=0.5) as bar:
        for (title, task), make in itertools.product(tasks.items(), makers):
            own = [name for name in names if SCHEMES[name].make is make]
            bar.set_postfix_str(f"{title}: {own[0]}")
            model = train(make, task, dataclasses.replace(config, vocabulary=task.vocabulary), bar)
            for name, length in itertools.product(own, lengths):
                results[title][name][length] = score(SCHEMES[name], model, task, TESTED * lengths[-1], length)
                bar.update()
    return results


def print_tables(results: Results, tasks: dict[str, Task], lengths: tuple[int, ...]) -> None:
    for title, scores in results.items():
        print(f"\n{f'{title}, {tasks[title].measure}':36}" + "".join(f"{length:>9}" for length in lengths))
        for name, by_length in scores.items():
            print(f"{name:36}" + "".join(f"{value:9.3f}" for value in by_length.values()))


def draw_curves(results: Results, tasks: dict[str, Task], path: pathlib.Path) -> None:
    """A panel for each task; schemes of one model share a colour."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(results) + 1.6, 4.6), layout="constrained")
    for axes, (title, scores) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        makers = list(dict.fromkeys(SCHEMES[name].make for name in scores))
        for name, by_length in scores.items():
            colour = makers.index(SCHEMES[name].make)
            style = [other for other in scores if SCHEMES[other].make is makers[colour]].index(name)
            options = {
                "color": COLOURS[colour % len(COLOURS)],
                "linestyle": ("-", "--", ":", "-.")[style % 4],
                "label": name,
            }
            axes.plot(list(by_length), list(by_length.values()), marker=".", **options)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(by_length), [str(length) for length in by_length])
        axes.set(title=title, xlabel=f"length (trained: {TRAINED})", ylabel=tasks[title].measure)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=120)


def check(of_text: dict[str, dict[int, float]], barely_trained: bool) -> list[str]:
    """Sentences about schemes that did not do on text what the docstring says."""
    wrong = []
    for name, by_length in of_text.items():
        growth = by_length[max(by_length)] - by_length[TRAINED]
        if name in HOLDS and growth > 0.1:
            wrong.append(f"{name} lost {growth:.2f} bits per character in longer texts; it should hold")
        if name in BREAKS and growth < 0.5 and not barely_trained:
            wrong.append(f"{name} lost only {growth:.2f} bits per character in longer texts; it should break")
    return wrong


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--text", type=pathlib.Path, help="a text file to learn (UTF-8)")
    parser.add_argument("--steps", type=int, help="training steps of each model (1000; 200 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small models, few steps, lengths to 256")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES), metavar="SCHEME")
    parser.add_argument("--tasks", nargs="+", choices=["text", "copying", "recall"], metavar="TASK")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training data (0)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads that compute (all)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo"), help="folder of the picture (demo)")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the numbers")
    return parser.parse_args()


def configure(arguments: argparse.Namespace) -> Config:
    size = {"width": 32, "batch": 16, "learning_rate": 1e-2} if arguments.quick else {"width": 64}
    steps = arguments.steps or (200 if arguments.quick else 1000)
    return Config(0, TRAINED, layers=2, heads=4, steps=steps, warmup=steps // 10, seed=arguments.seed, **size)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    lengths = tuple(n for n in LENGTHS if n <= 256 or not arguments.quick)
    tasks = make_tasks(Corpus.of(read_text(arguments.text)), lengths[-1])
    tasks = {name: tasks[name] for name in arguments.tasks or tasks}
    results = run(tasks, arguments.schemes, configure(arguments), lengths)
    print_tables(results, tasks, lengths)
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw_curves(results, tasks, arguments.out / "length_generalisation.png")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if wrong := check(results.get("text", {}), arguments.quick):
        sys.exit("length_generalisation: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
