"""How fast each pair of elements turns with its position, and the scalings that stretch a context; `rotary` has the
public names.

Frequencies are float64 and made anew for every call, on the device of x: nothing is stored that `.half()` could round,
another device could lack or another offset could leave behind.
"""

import dataclasses
import math
import numbers
import typing
from collections.abc import Sequence

import torch
from torch import Tensor

BASE = 10000.0


class Frequencies(typing.NamedTuple):
    """What `rope` turns by: an angle is a position times an inverse frequency.

    >>> Frequencies(torch.ones(2, dtype=torch.float64)).factor
    1.0
    """

    inverse: Tensor  # float64 [pairs], radians for each step of position
    factor: float = 1.0  # multiplies what has turned, "attention factor"
    axes: tuple[int, ...] = ()  # the axis of positions that each pair is on; empty: there is one


class Scaling:
    """How a model trained on short contexts reads longer ones; `frequencies` is all that a scheme says."""

    by_length: typing.ClassVar[bool] = False  # whether the length of the call matters

    def __post_init__(self) -> None:
        """Numbers, by the fields' types, are finite and above 0."""
        for field in dataclasses.fields(self):
            given, several = getattr(self, field.name), typing.get_origin(field.type) is tuple
            if (given is None and field.default is None) or not (several or field.type in (int, float, float | None)):
                continue
            wanted = "a sequence of numbers" if several else "a number"
            given = given if several else [given]
            if not isinstance(given, Sequence) or not all(map(is_number, given)):
                got = repr(getattr(self, field.name))[:80]
                raise TypeError(f"{type(self).__name__}: expected {field.name} {wanted}, got {got}")
            for x in given:
                if not 0 < x < math.inf:
                    raise ValueError(f"{type(self).__name__}: expected {field.name} above 0 and finite, got {x}")

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation: every frequency divided by `factor` (Chen et al., 2023, arXiv:2306.15595).

    >>> frequencies(4, scaling=Linear(2.0)).inverse.tolist()
    [0.5, 0.005]
    """

    factor: float

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        return Frequencies(_unscaled(rotary_dim, base, device) / self.factor)


@dataclasses.dataclass(frozen=True)
class DynamicNTK(Scaling):
    """A base that grows once a call is longer than `original_length`: base (factor L / original - factor + 1)^(R/(R-2))

    with R = rotary_dim and L the largest position + 1 (bloc97 and emozilla, 2023; Peng et al., arXiv:2309.00071, B.1).

    >>> frequencies(4, scaling=DynamicNTK(1.0, 100), length=200).inverse.tolist()
    [1.0, 0.005]
    """

    factor: float
    original_length: int
    by_length: typing.ClassVar[bool] = True

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        if rotary_dim <= 2:  # one pair, which turns by 1 whatever the base
            return Frequencies(_unscaled(rotary_dim, base, device))
        longer = _as_tensor(length, device).clamp(min=self.original_length)
        stretch = self.factor * longer / self.original_length - (self.factor - 1)
        return Frequencies(_unscaled(rotary_dim, base * stretch ** (rotary_dim / (rotary_dim - 2)), device))


@dataclasses.dataclass(frozen=True)
class YaRN(Scaling):
    """Slow pairs interpolated, fast ones kept, a ramp over the pairs between (Peng et al., 2023, arXiv:2309.00071).

    A pair is fast if it turns `beta_fast` times or more within `original_length`, slow at `beta_slow` or fewer; the
    ramp is linear in the pair's number between the two, rounded outwards, as in the authors' code. The factor is
    0.1 ln(factor) + 1 unless given.

    >>> round(frequencies(8, scaling=YaRN(4.0, 2048)).factor, 4)
    1.1386
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        if base == 1:
            raise ValueError("YaRN: expected base other than 1, at which all pairs turn alike, got 1")
        low = max(math.floor(self._pair_turning(self.beta_fast, rotary_dim, base)), 0)
        high = min(math.ceil(self._pair_turning(self.beta_slow, rotary_dim, base)), rotary_dim - 1)
        pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)
        slow = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        kept = _unscaled(rotary_dim, base, device)
        default = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        factor = default if self.attention_factor is None else self.attention_factor
        return Frequencies(kept * (1 - slow) + kept / self.factor * slow, factor)

    def _pair_turning(self, times: float, rotary_dim: int, base: float) -> float:
        return rotary_dim * math.log(self.original_length / (times * 2 * math.pi)) / (2 * math.log(base))


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Pairs of wavelengths beyond original_length / low_freq_factor divided by `factor`, those below
    original_length / high_freq_factor kept, a ramp in the number of turns between (Llama team, 2024, arXiv:2407.21783).

    >>> frequencies(4, base=500000.0, scaling=Llama3(8.0, 8192)).inverse[0].item()
    1.0
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        kept = _unscaled(rotary_dim, base, device)
        turns = self.original_length * kept / (2 * math.pi)
        fast = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return Frequencies(kept * fast + kept / self.factor * (1 - fast))


@dataclasses.dataclass(frozen=True)
class LongRoPE(Scaling):
    """A searched factor for each pair, one list for calls up to `original_length` and one for longer ones.

    The factor is sqrt(1 + ln(length / original_length) / ln(original_length)) unless given, `length` being the longest
    context the model is meant for (Ding et al., 2024, arXiv:2402.13753).

    >>> frequencies(2, scaling=LongRoPE((1.0,), (4.0,), 10, 40), length=11).inverse.tolist()
    [0.25]
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    length: int
    attention_factor: float | None = None
    by_length: typing.ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_length <= 1:
            raise ValueError(f"LongRoPE: expected original_length above 1, got {self.original_length}")

    def frequencies(self, rotary_dim: int, base: float, length: int | Tensor, device: torch.device) -> Frequencies:
        for name, given in (("short", self.short), ("long", self.long)):
            if len(given) != rotary_dim // 2:
                raise ValueError(f"LongRoPE: expected {name} length {rotary_dim // 2}, got {len(given)}")
        short, long = (torch.tensor(given, dtype=torch.float64, device=device) for given in (self.short, self.long))
        is_long = _as_tensor(length, device) > self.original_length
        ratio = self.length / self.original_length
        default = math.sqrt(1 + math.log(ratio) / math.log(self.original_length)) if ratio > 1 else 1.0
        factor = default if self.attention_factor is None else self.attention_factor
        return Frequencies(_unscaled(rotary_dim, base, device) / torch.where(is_long, long, short), factor)


def frequencies(
    rotary_dim: int,
    *,
    base: float = BASE,
    scaling: Scaling | None = None,
    length: int | Tensor = 0,
    device: torch.device | str | None = None,
) -> Frequencies:
    """The inverse frequencies base^(-2i / rotary_dim) of pairs i = 0, 1, ..., scaled.

    `length` is the largest position of the call + 1, for the scalings that ask (DynamicNTK, LongRoPE).

    >>> frequencies(4).inverse.tolist()
    [1.0, 0.01]
    """
    return scaled_frequencies("frequencies", rotary_dim, base, scaling, length, device)


def axial(
    rotary_dim: int, axes: int = 2, *, base: float = BASE, device: torch.device | str | None = None
) -> Frequencies:
    """Frequencies for positions with several axes, as of pixels: each axis has an equal share of the pairs and, in it,
    the whole range of frequencies.

    >>> axial(8).inverse.tolist(), axial(8).axes
    ([1.0, 0.01, 1.0, 0.01], (0, 0, 1, 1))
    >>> from attention_ops import rope
    >>> image = rope(torch.randn(1, 2, 12, 8), positions=grid(3, 4), frequencies=axial(8))

    Heo et al., Rotary Position Embedding for Vision Transformer, 2024, https://arxiv.org/abs/2403.13298.
    """
    if axes < 1 or rotary_dim % (2 * axes):
        raise ValueError(f"axial: expected rotary_dim a multiple of {2 * max(axes, 1)}, got {rotary_dim}")
    one = scaled_frequencies("axial", rotary_dim // axes, base, None, 0, device).inverse
    return Frequencies(one.repeat(axes), axes=_on_axes([len(one)] * axes))


def sections(of: Frequencies, pairs: Sequence[int]) -> Frequencies:
    """The same frequencies with the first pairs[0] of them on axis 0 of the positions, the next pairs[1] on axis 1, ...

    >>> sections(frequencies(8), (2, 1, 1)).axes
    (0, 0, 1, 2)

    Wang et al., Qwen2-VL (M-RoPE), 2024, https://arxiv.org/abs/2409.12191.
    """
    if sum(pairs) != len(of.inverse) or min(pairs) < 0:
        raise ValueError(f"sections: expected pairs of 0 or more that sum to {len(of.inverse)}, got {list(pairs)}")
    return of._replace(axes=_on_axes(pairs))


def grid(*sizes: int, device: torch.device | str | None = None) -> Tensor:
    """Positions [axes, L] of the cells of a grid, its last axis running fastest.

    >>> grid(2, 3).tolist()
    [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    return torch.stack(torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")).flatten(1)


def is_number(x: object) -> bool:
    """Of numpy too."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def _on_axes(pairs: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis, count in enumerate(pairs) for _ in range(count))


def _unscaled(rotary_dim: int, base: float | Tensor, device: torch.device | None) -> Tensor:
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / -max(rotary_dim, 1))


def _as_tensor(length: int | Tensor, device: torch.device | str | None) -> Tensor:
    """`torch.full`, since `torch.tensor` would fix a length that a compiler keeps open."""
    if isinstance(length, Tensor):
        return length.to(device=device, dtype=torch.float64)
    return torch.full((), length, dtype=torch.float64, device=device)


def scaled_frequencies(
    operator: str,
    rotary_dim: int,
    base: float,
    scaling: Scaling | None,
    length: int | Tensor,
    device: torch.device | str | None,
) -> Frequencies:
    for name, given, kind in (("rotary_dim", rotary_dim, int | torch.SymInt), ("base", base, int | float)):
        if not isinstance(given, kind) or isinstance(given, bool):
            raise TypeError(f"{operator}: expected {name} a number, got {type(given).__name__}")
    if rotary_dim < 0 or rotary_dim % 2:
        raise ValueError(f"{operator}: expected rotary_dim even and 0 or more, got {rotary_dim}")
    if not 0 < base < math.inf:
        raise ValueError(f"{operator}: expected base finite and above 0, got {base}")
    if scaling is None:
        return Frequencies(_unscaled(rotary_dim, base, device))
    return scaling.frequencies(rotary_dim, base, length, device)
