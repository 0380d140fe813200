"""Rotary frequencies: each scaling against a loop in plain numbers, axes, and other libraries where they are there."""

import math

import pytest
import torch
from test_errors import refuses

import attention_ops
from attention_ops import position, rope, rotary

LLAMA3 = rotary.Llama3(8.0, 8192)
YARN = rotary.YaRN(4.0, 2048)


def plain(width: int, base: float = 10000.0) -> list[float]:
    return [base ** (-2 * i / width) for i in range(width // 2)]


def equal(ours: rotary.Frequencies, inverse: list[float], factor: float = 1.0) -> None:
    assert ours.inverse.dtype == torch.float64
    torch.testing.assert_close(ours.inverse, torch.tensor(inverse, dtype=torch.float64), rtol=1e-13, atol=0)
    assert ours.factor == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize("width", [0, 2, 6, 128])
def test_without_scaling(width):
    equal(rotary.frequencies(width), plain(width))
    equal(rotary.frequencies(width, base=5e5), plain(width, 5e5))


def test_linear():
    equal(rotary.frequencies(16, scaling=rotary.Linear(4.0)), [f / 4 for f in plain(16)])
    x = torch.randn(1, 1, 5, 8)
    torch.testing.assert_close(
        rope(x, positions=4 * torch.arange(5), scaling=rotary.Linear(4.0)), rope(x), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("length", [1, 100, 101, 4096])
@pytest.mark.parametrize("width", [4, 64])
def test_dynamic_ntk(length, width):
    longer = max(length, 100)
    base = 10000 * (2.5 * longer / 100 - (2.5 - 1)) ** (width / (width - 2))
    ours = rotary.frequencies(width, scaling=rotary.DynamicNTK(2.5, 100), length=length)
    equal(ours, plain(width, base))


def test_dynamic_scalings_read_the_length_off_the_call():
    x, scaling = torch.randn(2, 1, 5, 8), rotary.DynamicNTK(2.0, 6)
    wanted = {n: rotary.frequencies(8, scaling=scaling, length=n) for n in (5, 8, 15)}
    assert torch.equal(rope(x, scaling=scaling), rope(x, frequencies=wanted[5]))
    assert torch.equal(rope(x, scaling=scaling, offset=3), rope(x, offset=3, frequencies=wanted[8]))
    positions = torch.tensor([[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])
    assert torch.equal(
        rope(x, scaling=scaling, positions=positions), rope(x, positions=positions, frequencies=wanted[15])
    )
    offset = torch.tensor([0, 10])
    assert torch.equal(rope(x, scaling=scaling, offset=offset), rope(x, positions=positions, frequencies=wanted[15]))
    assert torch.equal(rope(x, scaling=scaling), rope(x, frequencies=wanted[5]))  # and forgets it


@pytest.mark.parametrize(("width", "base", "factor", "original"), [(64, 1e4, 4.0, 2048), (128, 1e6, 16.0, 4096)])
def test_yarn(width, base, factor, original):
    """As the authors' code has it: a ramp over the numbers of the pairs."""

    def pair_turning(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair_turning(32)), 0), min(math.ceil(pair_turning(1)), width - 1)
    inverse = []
    for i, kept in enumerate(plain(width, base)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        inverse.append(kept / factor * ramp + kept * (1 - ramp))
    ours = rotary.frequencies(width, base=base, scaling=rotary.YaRN(factor, original))
    equal(ours, inverse, 0.1 * math.log(factor) + 1)
    assert ours.inverse[0] == 1
    torch.testing.assert_close(ours.inverse[-1].item(), plain(width, base)[-1] / factor)
    given = rotary.frequencies(width, base=base, scaling=rotary.YaRN(factor, original, attention_factor=1.0))
    equal(given, inverse)


def test_llama3():
    inverse = []
    for kept in plain(128, 5e5):
        wavelength = 2 * math.pi / kept
        if wavelength > 8192 / 1:
            inverse.append(kept / 8)
        elif wavelength < 8192 / 4:
            inverse.append(kept)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            inverse.append((1 - smooth) * kept / 8 + smooth * kept)
    equal(rotary.frequencies(128, base=5e5, scaling=LLAMA3), inverse)


@pytest.mark.parametrize("length", [1024, 1025])
def test_longrope(length):
    short, long = tuple(1 + i / 10 for i in range(8)), tuple(1.0 + i for i in range(8))
    ours = rotary.frequencies(16, scaling=rotary.LongRoPE(short, long, 1024, 8192), length=length)
    chosen = short if length <= 1024 else long
    factor = math.sqrt(1 + math.log(8) / math.log(1024))
    equal(ours, [f / c for f, c in zip(plain(16), chosen, strict=True)], factor)
    wrong = rotary.LongRoPE(short, long, 9, 9)
    refuses(ValueError, "short length 4, got 8", rotary.frequencies, 8, scaling=wrong)


def test_the_factor_multiplies_what_turns():
    x = torch.randn(1, 2, 4, 70)
    scaled, bare = rotary.frequencies(64, scaling=YARN), rotary.frequencies(64, scaling=YARN)._replace(factor=1.0)
    ours = rope(x, frequencies=scaled)
    torch.testing.assert_close(ours[..., :64], scaled.factor * rope(x, frequencies=bare)[..., :64])
    assert torch.equal(ours[..., 64:], x[..., 64:])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_axes_of_an_image(layout):
    """A row of width 8: its first two pairs turn with y, the others with x, each by 1 and by 1/100."""
    x = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    out = rope(x, positions=rotary.grid(3, 4), frequencies=rotary.axial(8), layout=layout)
    for cell in range(12):
        y_and_x = divmod(cell, 4)
        for pair in range(4):
            angle = y_and_x[pair // 2] * (1.0, 0.01)[pair % 2]
            first, second = (pair, pair + 4) if layout == "half" else (2 * pair, 2 * pair + 1)
            a, b = x[:, :, cell, first], x[:, :, cell, second]
            wanted = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close((out[:, :, cell, first], out[:, :, cell, second]), wanted)


def test_sections_of_the_frequencies():
    """Time, height and width each turn the pairs of their own section; where they are equal it is plain rope."""
    x, positions = torch.randn(2, 3, 5, 12), torch.randint(0, 50, (2, 3, 5))
    frequencies = rotary.sections(rotary.frequencies(12), (1, 2, 3))
    out = rope(x, positions=positions, frequencies=frequencies)
    for pair, axis in enumerate((0, 1, 1, 2, 2, 2)):
        alone = rope(x, positions=positions[:, axis])
        assert torch.equal(out[..., pair::6], alone[..., pair::6])
    text = positions[:, :1].expand(2, 3, 5)
    assert torch.equal(rope(x, positions=text, frequencies=frequencies), rope(x, positions=positions[:, 0]))
    moved = rope(x, positions=positions, offset=torch.tensor([5, 9]), frequencies=frequencies)
    shifted = positions + torch.tensor([5, 9])[:, None, None]
    assert torch.equal(moved, rope(x, positions=shifted, frequencies=frequencies))
    assert torch.equal(rope(x[0], positions=positions[0], frequencies=frequencies), out[0])


@pytest.mark.parametrize("scaling", [None, rotary.DynamicNTK(4.0, 8), rotary.YaRN(2.0, 16)], ids=str)
@pytest.mark.parametrize(
    "positions", [None, position.left_padded(torch.tensor([9, 12]), 12)], ids=["counted", "padded"]
)
def test_rope_as_an_option_of_attention(positions, scaling):
    """Equal to rotating first, with a cache too: the last queries after all keys."""
    query, key, value = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64).unbind(0)
    turn = {"positions": positions, "scaling": scaling, "layout": "interleaved", "rotary_dim": 4}
    turned = [rotary.rope(x, **turn) for x in (query, key)]
    option = {"rope": rotary.Rope(**turn), "mask": "causal"}
    out = attention_ops.attention(query, key, value, **option)
    assert torch.equal(out, attention_ops.attention(*turned, value, mask="causal"))
    last = attention_ops.attention(query[:, :, 9:], key, value, **option)
    torch.testing.assert_close(last, out[:, :, 9:])
    weights = attention_ops.attention_weights(query, key, **option)
    assert torch.equal(weights, attention_ops.attention_weights(*turned, mask="causal"))
    summaries = attention_ops.attention_summaries(query, key, **option)
    assert all(map(torch.equal, summaries, attention_ops.attention_summaries(*turned, mask="causal")))


def test_rope_as_an_option_refuses():
    x = torch.randn(1, 1, 4, 8)
    turn = rotary.Rope()
    refuses(TypeError, "rope a rotary.Rope, got float", attention_ops.attention, x, x, x, rope=1.0)
    refuses(
        ValueError,
        "query length of at most 3 as in key, with rope, got 4",
        attention_ops.attention,
        x,
        x[:, :, 1:],
        x[:, :, 1:],
        rope=turn,
    )


def test_errors():
    refuses(ValueError, "rotary_dim a multiple of 4, got 6", rotary.axial, 6)
    refuses(ValueError, "rotary_dim a multiple of 2, got 6", rotary.axial, 6, 0)
    refuses(ValueError, "pairs of 0 or more that sum to 4, got .1, 2.", rotary.sections, rotary.frequencies(8), (1, 2))
    refuses(ValueError, "rotary_dim even and 0 or more, got 5", rotary.frequencies, 5)


@pytest.mark.parametrize(
    ("name", "parameters", "scaling"),
    [
        ("linear", {"factor": 4.0}, rotary.Linear(4.0)),
        ("dynamic", {"factor": 2.0}, rotary.DynamicNTK(2.0, 2048)),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}, YARN),
        (
            "llama3",
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            LLAMA3,
        ),
        (
            "longrope",
            {
                "short_factor": [1.0 + i for i in range(32)],
                "long_factor": [2.0 + i for i in range(32)],
                "original_max_position_embeddings": 512,
                "factor": 4.0,
            },
            rotary.LongRoPE(tuple(1.0 + i for i in range(32)), tuple(2.0 + i for i in range(32)), 512, 2048),
        ),
    ],
)
@pytest.mark.parametrize("length", [100, 9000])
def test_as_in_transformers(name, parameters, scaling, length):
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed")
    llama = pytest.importorskip("transformers.models.llama", reason="transformers is not installed")
    parameters = {"rope_type": name, "rope_theta": 10000.0, **parameters}
    config = llama.LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=2048, rope_parameters=parameters
    )
    inverse, factor = utils.ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)
    ours = rotary.frequencies(64, scaling=scaling, length=length)
    torch.testing.assert_close(ours.inverse, inverse.double(), rtol=1e-5, atol=0)
    assert ours.factor == pytest.approx(factor)


def test_layouts_as_in_other_libraries():
    embedding = pytest.importorskip("rotary_embedding_torch", reason="rotary-embedding-torch is not installed")
    x = torch.randn(2, 3, 50, 32)
    theirs = embedding.RotaryEmbedding(dim=32).rotate_queries_or_keys(x)
    torch.testing.assert_close(rope(x, layout="interleaved"), theirs.detach(), rtol=1e-4, atol=1e-5)
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="transformers is not installed")
    angle = torch.arange(50)[:, None] * rotary.frequencies(32).inverse
    cosine, sine = (torch.cat((t, t), -1)[None].float() for t in (angle.cos(), angle.sin()))
    theirs, _ = modeling.apply_rotary_pos_emb(x, x, cosine, sine)
    torch.testing.assert_close(rope(x), theirs, rtol=1e-4, atol=1e-5)


WRONG_ROPES = {
    "positions_0d": (ValueError, {"positions": torch.tensor(3)}, "positions with 1 or more dimensions, got 0"),
    "positions_list": (TypeError, {"positions": [1]}, "positions a Tensor, got list"),
    "inverse": (TypeError, {"frequencies": rotary.Frequencies([1.0] * 4)}, "frequencies.inverse a Tensor, got "),
    "factor": (TypeError, {"frequencies": rotary.frequencies(8)._replace(factor="x")}, "factor a number, got 'x'"),
    "axes": (TypeError, {"frequencies": rotary.frequencies(8)._replace(axes="abcd")}, "axes a tuple of integers, got"),
    "no_axes": (TypeError, {"frequencies": rotary.frequencies(8)._replace(axes=None)}, "axes a tuple of integers, got"),
    "base": (TypeError, {"base": "a"}, "base a number, got str"),
    "rotary_dim": (TypeError, {"rotary_dim": 4.0}, "rotary_dim a number, got float"),
    "scaling": (TypeError, {"scaling": 1.0}, "scaling a rotary.Scaling, got float"),
    "both": (ValueError, {"scaling": rotary.Linear(2.0), "frequencies": rotary.frequencies(8)}, "no base, .*got both"),
}


@pytest.mark.parametrize("name", WRONG_ROPES)
def test_wrong_options_of_attention(name):
    error, options, message = WRONG_ROPES[name]
    x = torch.randn(1, 1, 4, 8)
    refuses(error, message, attention_ops.attention, x, x, x, rope=rotary.Rope(**options))


def test_scalings_refuse_what_divides_by_zero():
    refuses(ValueError, "factor above 0 and finite, got 0", rotary.Linear, 0)
    refuses(ValueError, "original_length above 0 and finite, got 0", rotary.YaRN, 2.0, 0)
    refuses(ValueError, "original_length above 0 and finite, got -1", rotary.DynamicNTK, 2.0, -1)


def test_offsets_are_added_without_rounding_or_wrapping():
    x, far = torch.randn(1, 1, 2, 8), 2**20 - 10
    for positions, offset in ((torch.tensor([0.1, 0.2]), far), (torch.tensor([126, 127], dtype=torch.int8), 5)):
        wanted = rope(x, positions=positions.double() + offset)
        for given in (offset, torch.tensor(offset), torch.tensor([offset])):
            assert torch.equal(rope(x, positions=positions, offset=given), wanted)
        added = position.sinusoidal(positions, 8, offset=offset)
        assert torch.equal(added, position.sinusoidal(positions.double() + offset, 8))


def test_a_scaling_sees_positions_of_narrow_types():
    x, positions = torch.randn(1, 1, 2, 8), torch.tensor([32766, 32767])
    scaling = rotary.DynamicNTK(2.0, 2048)
    wanted = rope(x, positions=positions, scaling=scaling)
    assert torch.equal(rope(x, positions=positions.short(), scaling=scaling), wanted)
    assert not torch.equal(rope(x, positions=positions), wanted)


def test_sinusoids_refuse_positions_that_are_rounded():
    with pytest.raises(TypeError, match="sinusoidal: expected positions of integers, float32 or float64, got"):
        position.sinusoidal(torch.tensor([257.0]).bfloat16(), 8)


BAD_SCALINGS = {
    "text": (TypeError, "YaRN: expected factor a number, got 'a'", lambda: rotary.YaRN("a", 10)),
    "turns": (ValueError, "YaRN: expected beta_fast above 0 and finite, got 0.0", lambda: rotary.YaRN(2.0, 10, 0.0)),
    "infinite": (
        ValueError,
        "Linear: expected factor above 0 and finite, got inf",
        lambda: rotary.Linear(math.inf),
    ),
    "none": (TypeError, "Linear: expected factor a number, got None", lambda: rotary.Linear(None)),
    "several": (TypeError, r"Linear: expected factor a number, got \[2.0\]", lambda: rotary.Linear([2.0])),
    "one": (TypeError, "LongRoPE: expected short a sequence of", lambda: rotary.LongRoPE(2.0, 2.0, 10, 40)),
    "list": (
        ValueError,
        "LongRoPE: expected short above 0 and finite, got 0.0",
        lambda: rotary.LongRoPE((0.0, 1.0), (1.0, 1.0), 10, 40),
    ),
    "short": (
        ValueError,
        "LongRoPE: expected original_length above 1",
        lambda: rotary.LongRoPE((1,), (1,), 1, 4),
    ),
}


@pytest.mark.parametrize("name", BAD_SCALINGS)
def test_scalings_refuse_what_is_no_number(name):
    error, message, make = BAD_SCALINGS[name]
    with pytest.raises(error, match=message):
        make()


def test_yarn_refuses_a_base_of_one():
    with pytest.raises(ValueError, match="YaRN: expected base other than 1"):
        rope(torch.randn(1, 1, 2, 8), base=1.0, scaling=rotary.YaRN(2.0, 10))


@pytest.mark.parametrize("given", ["", [], 0.0, False])
def test_a_rotary_dim_that_is_no_number_is_refused(given):
    with pytest.raises(TypeError, match="rotary_dim"):
        rope(torch.randn(1, 1, 2, 8), rotary_dim=given)


def test_an_offset_beyond_all_integers_of_float64_is_refused():
    refuses(ValueError, "offset from -2\\*\\*53 to 2\\*\\*53, got", rope, torch.randn(1, 1, 2, 8), offset=2**70)
