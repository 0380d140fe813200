"""Modules of positions: offsets, caches, left padding, casts, and what they refuse."""

import copy

import pytest
import torch
from test_errors import refuses
from torch import Tensor

from attention_ops import attention, masks, nn, position

ADDED = {
    "sinusoidal": lambda: nn.SinusoidalPositions(8),
    "halves": lambda: nn.SinusoidalPositions(8, layout="half"),
    "learned": lambda: nn.LearnedPositions(200, 8),
    "rotary": lambda: nn.RotaryEmbedding(),
    "rotary_part": lambda: nn.RotaryEmbedding(4, layout="interleaved"),
}
BIASES = {
    "alibi": lambda: nn.AlibiBias(4),
    "learned_alibi": lambda: nn.AlibiBias(6, learned=True),
    "t5": lambda: nn.T5Bias(4),
    "t5_causal": lambda: nn.T5Bias(4, bidirectional=False, buckets=8, max_distance=20),
    "kerple_log": lambda: nn.KerpleBias(4),
    "kerple_power": lambda: nn.KerpleBias(4, "power"),
    "clipped": lambda: nn.ClippedBias(4, reach=3),
}

DISTANCES = {
    **BIASES,
    "shaw": lambda: nn.ShawPositions(8, reach=3),
    "shaw_keys": lambda: nn.ShawPositions(8, reach=2, values=False),
    "transformer_xl": lambda: nn.TransformerXLPositions(4, 8),
}


def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, offset: int | Tensor = 0, **options):
    """Attention with what a module of distances gives."""
    counts = query.shape[-2], key.shape[-2]
    if isinstance(module, nn.DistanceBias):
        options["distance_bias"] = module.distance_bias(*counts, offset=offset)
    elif isinstance(module, nn.ShawPositions):
        options |= module(*counts, offset=offset)
    else:
        query, more = module(query, counts[1], offset=offset)
        options |= more
    return attention(query, key, value, **options)


def heads_of(name: str) -> int:
    return DISTANCES[name]().distance_bias(1, 1).shape[1] if name in BIASES else 4


def rows(name: str, batch: int, length: int) -> Tensor:
    return torch.randn(batch, 2, length, 8) if name.startswith("rotary") else torch.randn(batch, length, 8)


@pytest.mark.parametrize("name", ADDED)
def test_five_and_one_are_six(name):
    module, x = ADDED[name](), rows(name, 2, 6)
    whole = module(x)
    assert torch.equal(torch.cat((module(x[..., :5, :]), module(x[..., 5:, :], offset=5)), -2), whole)
    assert torch.equal(module(x, positions=torch.arange(6)), whole)
    assert torch.equal(module(x, offset=0), whole)  # after another offset


@pytest.mark.parametrize("name", ADDED)
def test_samples_with_offsets_and_padding_of_their_own(name):
    module, x = ADDED[name](), rows(name, 3, 6)
    offsets = torch.tensor([0, 9, 100])
    each = [module(x[b : b + 1], offset=offsets[b].item()) for b in range(3)]
    assert torch.equal(module(x, offset=offsets), torch.cat(each))
    padded = module(x, positions=position.left_padded(torch.tensor([6, 4, 1]), 6))
    for b, length in enumerate((6, 4, 1)):
        assert torch.equal(padded[b : b + 1, ..., 6 - length :, :], module(x[b : b + 1, ..., 6 - length :, :]))


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(name, dtype):
    """Rounded once at the end: a cast of the module rounds no position."""
    module, x = ADDED[name](), rows(name, 1, 4).to(dtype)
    wanted = module(x.double(), offset=150) if name != "learned" else module.to(dtype)(x, offset=150).double()
    out = module.to(dtype)(x, offset=150)
    assert out.dtype == dtype
    assert ((out.double() - wanted).abs() <= 1.1 * torch.finfo(dtype).eps * (1 + wanted.abs())).all()


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_biases_of_half_types(name, dtype):
    """Nothing leaves the type's range, where minus infinity would hide a key, and gradients are finite."""
    torch.manual_seed(0)
    module = BIASES[name]().to(dtype)
    bias = module.distance_bias(512, 512)
    wanted = copy.deepcopy(module).double().distance_bias(512, 512)
    assert bias.isfinite().all()
    torch.testing.assert_close(bias.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    query, key, value = torch.randn(3, 1, bias.shape[1], 512, 8, dtype=dtype)
    query.requires_grad_()
    attention(query, key, value, distance_bias=bias, mask="causal").sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, *module.parameters()))


def test_fixed_slopes_survive_new_memory():
    with torch.device("meta"):
        module = nn.AlibiBias(4)
    module.to_empty(device="cpu")
    module.load_state_dict(nn.AlibiBias(4).state_dict())
    assert torch.equal(module.slopes, nn.AlibiBias(4).slopes)


def test_positions_of_another_length_are_refused():
    x, places = torch.randn(3, 1, 8), torch.tensor([4, 5, 6])
    for module in (nn.LearnedPositions(10, 8), nn.SinusoidalPositions(8)):
        refuses(ValueError, r"positions \[..., 1\] as in x, got \[3\]", module, x, positions=places)
        assert module(x, positions=places[:, None]).shape == (3, 1, 8)
    query = torch.randn(2, 1, 6, 8)
    refuses(ValueError, r"query \[..., 4, L, 8\], got \[2, 1, 6, 8\]", nn.TransformerXLPositions(4, 8), query, 6)


@pytest.mark.parametrize("name", BIASES)
def test_a_cached_step_has_the_last_row_of_the_whole(name):
    module = BIASES[name]()
    whole = module(6, 6)
    assert torch.equal(module(1, 6), whole[:, :, 5:])
    assert torch.equal(module(3, 6), whole[:, :, 3:])
    assert torch.equal(position.expand(module.distance_bias(6, 6), 6, 6), whole)


@pytest.mark.parametrize("name", DISTANCES)
def test_attention_with_a_cache(name):
    """Five tokens and one are six."""
    module, (query, key, value) = DISTANCES[name](), torch.randn(3, 2, heads_of(name), 6, 8).unbind(0)
    whole = attend(module, query, key, value, mask="causal")
    torch.testing.assert_close(attend(module, query[:, :, 5:], key, value, mask="causal"), whole[:, :, 5:])


@pytest.mark.parametrize("name", DISTANCES)
def test_left_padding_changes_nothing(name):
    module, (query, key, value) = DISTANCES[name](), torch.randn(3, 1, heads_of(name), 6, 8).unbind(0)
    padded = attend(module, query, key, value, mask=masks.causal() & masks.ranges(*left(6, 2)))
    alone = attend(module, *(t[:, :, 2:] for t in (query, key, value)), mask="causal")
    torch.testing.assert_close(padded[:, :, 2:], alone)


@pytest.mark.parametrize("name", DISTANCES)
def test_caches_padded_on_the_right(name):
    """Each sample's query stands at the last key of its own."""
    module, (query, key, value) = DISTANCES[name](), torch.randn(3, 3, heads_of(name), 6, 8).unbind(0)
    query, lengths = query[:, :, :1], torch.tensor([6, 4, 1])
    out = attend(module, query, key, value, offset=6 - lengths, mask=masks.padding(lengths))
    for b, n in enumerate(lengths.tolist()):
        alone = attend(module, query[b : b + 1], key[b : b + 1, :, :n], value[b : b + 1, :, :n])
        torch.testing.assert_close(out[b : b + 1], alone)


def left(length: int, padding: int) -> tuple[Tensor, Tensor]:
    return torch.full((length,), padding), torch.full((length,), length)


@pytest.mark.parametrize("name", [name for name in DISTANCES if name != "alibi"])
def test_what_depends_on_the_distance_learns(name):
    module, (query, key, value) = DISTANCES[name](), torch.randn(3, 2, heads_of(name), 9, 8).unbind(0)
    attend(module, query, key, value).square().sum().backward()
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def test_a_window_bias_and_learned_positions_learn():
    window = nn.WindowBias(2, 2, 3)
    query = torch.randn(1, 2, 6, 4)
    attention(query, query, query, bias=window()).square().sum().backward()
    assert window.table.grad.abs().max() > 0
    learned = nn.LearnedPositions(10, 4)
    learned(torch.randn(2, 3, 4), offset=2).sum().backward()
    assert learned.weight.grad[:, 0].tolist() == [0, 0, 2, 2, 2, 0, 0, 0, 0, 0]


def test_fixed_slopes_stay_as_they_are_in_half_types():
    module = nn.AlibiBias(12)
    wanted = module(3, 3000)
    for cast in (module.half, module.bfloat16, module.double, module.float):
        assert torch.equal(cast()(3, 3000), wanted)
    assert not module.state_dict()
    assert torch.equal(copy.deepcopy(module)(3, 3000), wanted)
    assert module.to("meta")(2, 2).device.type == "meta"


def test_a_table_is_resized_on_request():
    module = nn.LearnedPositions(5, 3)
    longer = module.resized(9).weight
    for row in range(9):
        low, part = divmod(row, 2)
        wanted = module.weight[low] if part == 0 else (module.weight[low] + module.weight[low + 1]) / 2
        torch.testing.assert_close(longer[row], wanted)
    assert torch.equal(module.resized(5).weight, module.weight)


@pytest.mark.parametrize("name", [*ADDED, *BIASES])
def test_modules_compile(name):
    torch._dynamo.reset()
    module = {**ADDED, **BIASES}[name]()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (6, 9, 12):
        args = (rows(name, 2, length),) if name in ADDED else (length, length + 1)
        torch.testing.assert_close(compiled(*args), module(*args))


def test_errors():
    module = nn.LearnedPositions(8, 4)
    x = torch.randn(2, 3, 4)
    refuses(ValueError, r"positions from 0 to 7 \(or a table `resized`\), got 6 to 8", module, x, offset=6)
    refuses(ValueError, "positions from 0 to 7 .*, got -1 to 1", module, x, offset=-1)
    refuses(ValueError, "positions from 0 to 7 .*, got 0 to 8", module, x, positions=torch.tensor([0, 3, 8]))
    refuses(ValueError, "positions from 0 to 7 .*, got -2 to 1", module, x, positions=torch.tensor([0, 1, -2]))
    refuses(ValueError, "positions from 0 to 7 .*, got 0 to 9", module, x, offset=torch.tensor([0, 7]))
    refuses(ValueError, r"x \[..., L, 4\], got \[2, 3, 5\]", module, torch.randn(2, 3, 5))
    refuses(ValueError, r"x \[..., L, 8\], got \[8\]", nn.SinusoidalPositions(8), torch.randn(8))
    refuses(ValueError, "kind log or power, got 'exp'", nn.KerpleBias, 2, "exp")


def test_tensors_are_asked_for_by_name():
    refuses(TypeError, "slopes a Tensor, got list", position.alibi, [0.5], 2, 2)
    refuses(TypeError, "r2 a Tensor, got float", position.kerple_log, torch.ones(1), 0.5, 2, 2)
    refuses(TypeError, "x a Tensor, got NoneType", nn.TransformerXLPositions(2, 8), None, 4)


def test_fixed_slopes_leave_the_meta_device_within_its_context():
    with torch.device("meta"):
        module = nn.AlibiBias(4).to_empty(device="cpu")
    assert torch.equal(module.slopes, nn.AlibiBias(4).slopes)
    refuses(
        TypeError, "positions a Tensor, got list", nn.LearnedPositions(4, 8), torch.zeros(1, 2, 8), positions=[0, 1]
    )
