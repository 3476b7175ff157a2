"""RotaryEmbedding: tables of cosines and sines, with the scalings for longer contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ConfigError
from engine.layers.position_tables import PositionTables
from engine.layers.rotary_sections import AXES, RotarySections

# Required settings of each type, for which its formula has no default.
NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
LAYER_KINDS = ("full_attention", "sliding_attention")  # that may have their own parameters
# Settings that the reference ignores, but other implementations read.
REFUSED: dict[str, set[str]] = {"longrope": {"short_mscale", "long_mscale"}}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Settings that scale rotary frequencies to contexts longer than the original one.

    `longrope` (arXiv 2402.13753) divides each frequency by its own factor, from one of two lists.
    The long one applies if more positions are served than the original ones. `proportional`
    (Gemma 4) computes the frequencies of the whole head and keeps the first `share` of them. The
    others are 0.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0  # yarn: this and the next one count only together
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    share: float = 1.0  # of each head's dimensions, that is rotated

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, partial: bool = False) -> RopeScaling:
        """Read `rope_scaling` or `rope_parameters` of a Hugging Face config.

        `partial` is whether the architecture may rotate a part of each head's dimensions. Raises
        ConfigError if the settings are incomplete, contradictory or not supported.
        """
        given = rope_parameters(config)
        kind = given.get("rope_type") or given.get("type") or "default"
        if not isinstance(kind, str) or kind not in NEEDED:
            raise ConfigError(
                f"rope_scaling type {kind!r} is not supported; supported: {', '.join(NEEDED)}."
            )
        if refused := sorted(REFUSED.get(kind, set()) & given.keys()):
            raise ConfigError(
                f"config.json has rope_scaling {kind} with {refused[0]}; only {kind} without it is "
                "supported."
            )
        share = _share(given, config)
        if share != 1.0 and not partial and kind != "proportional":
            raise ConfigError(
                f"config.json has partial_rotary_factor = {share!r}; only 1.0 is supported."
            )
        # transformers divides the lengths if yarn has a factor of null, but not without the key.
        is_divided = kind == "longrope" or (kind == "yarn" and "factor" in given)
        needed = [key for key in NEEDED[kind] if not (is_divided and key == "factor")]
        if missing := [key for key in needed if given.get(key) is None]:
            raise ConfigError(f"rope_scaling type {kind} in config.json lacks {missing[0]}.")
        longest = original = _number(config, "max_position_embeddings", 0)
        if kind != "dynamic":  # transformers ignores the setting for "dynamic"
            original = _number(given, "original_max_position_embeddings", original)
            original = _number(config, "original_max_position_embeddings", original)
        is_long = kind == "longrope"
        return cls(
            kind=kind,
            factor=_number(given, "factor", longest / original if is_divided else 1.0),
            low_freq_factor=_number(given, "low_freq_factor", 1.0),
            high_freq_factor=_number(given, "high_freq_factor", 4.0),
            original_max_positions=int(original),
            beta_fast=_number(given, "beta_fast", 32.0),
            beta_slow=_number(given, "beta_slow", 1.0),
            attention_factor=_optional(given, "attention_factor"),
            mscale=_optional(given, "mscale") or 0.0,
            mscale_all_dim=_optional(given, "mscale_all_dim") or 0.0,
            truncate=bool(given.get("truncate", True)),
            short_factors=_floats(given, "short_factor") if is_long else (),
            long_factors=_floats(given, "long_factor") if is_long else (),
            share=share,
        )

    def width(self, head_dim: int) -> int:
        """Return the number of rotated dimensions. Raises ConfigError unless they form pairs."""
        if self.kind == "proportional":
            return head_dim
        width = int(head_dim * self.share)
        if width < 2 or width % 2:
            raise ConfigError(
                f"config.json has partial_rotary_factor = {self.share:g} of {head_dim} dimensions; "
                f"an even number of them must be rotated, not {width}."
            )
        return width


def expect_one_table(scaling: RopeScaling) -> None:
    """Raise ConfigError for a scaling whose frequencies depend on the length of each text.

    The reference of an encoder computes them for each text.
    """
    if scaling.kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"config.json has rope_scaling {scaling.kind}; encoders are served with frequencies "
            "that are the same for all texts."
        )


def rope_theta(config: dict[str, Any]) -> float:
    """Return the base of the frequencies. Newer configs have it inside `rope_parameters`."""
    outside = _number(config, "rope_theta", 10000.0)
    return _number(rope_parameters(config), "rope_theta", outside)


def parameters_by_kind(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_parameters` that are separate for each kind of layer; None if it is not given.

    Raises ConfigError if it has another form, or if there is a `rope_scaling` besides it.
    """
    given = config.get("rope_parameters")
    if given is None:
        return None
    if not isinstance(given, dict) or not given.keys() <= set(LAYER_KINDS):
        raise ConfigError(
            f"config.json has rope_parameters = {given!r}; supported: an object with parameters "
            f"for {' and '.join(LAYER_KINDS)} each."
        )
    if config.get("rope_scaling") is not None:
        raise ConfigError("config.json has rope_parameters and rope_scaling; remove one of them.")
    return given


def expect_truncated(given: Any) -> None:
    """Raise ConfigError for yarn's `truncate: false` in the parameters of one kind of layer.

    transformers 5.24 applies the setting only if all layers share their parameters.
    """
    if isinstance(given, dict) and not given.get("truncate", True):
        raise ConfigError(
            "config.json has truncate = False in the rope_parameters of one kind of layer; it is "
            "supported only for architectures with one set for all layers. Remove it."
        )


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` or the older `rope_scaling`, {} without both.

    Raises ConfigError if they differ, or are no parameters for all layers.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise ConfigError(
            "config.json has rope_parameters and a different rope_scaling; remove one of them."
        )
    given = new or old or {}
    if not isinstance(given, dict):
        raise ConfigError(f"config.json has rope_parameters = {given!r}; it must be an object.")
    if apart := [key for key, value in given.items() if isinstance(value, dict)]:
        raise ConfigError(
            f"config.json has separate rope_parameters for {' and '.join(apart)}; this "
            "architecture supports only one set for all layers."
        )
    return given


def _number(given: dict[str, Any], key: str, default: float) -> float:
    value = default if given.get(key) is None else given[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ConfigError(
            f"config.json has {key} = {given.get(key)!r}; it must be a number above 0."
        )
    return float(value)


def _optional(given: dict[str, Any], key: str) -> float | None:
    """Return a number from 0 upwards, or None if it is not given."""
    if given.get(key) is None:
        return None
    return 0.0 if given[key] == 0 else _number(given, key, 0)


def _share(given: dict[str, Any], config: dict[str, Any]) -> float:
    """Return the share of each head's dimensions that is rotated."""
    key = "partial_rotary_factor"
    share = _number(given, key, _number(config, key, 1.0))
    if share > 1:
        raise ConfigError(f"config.json has {key} = {share:g}; it must be at most 1.")
    return share


def _floats(given: dict[str, Any], key: str) -> tuple[float, ...]:
    values = given[key]
    if not isinstance(values, list):
        raise ConfigError(f"config.json has {key} = {values!r:.40}; it must be a list of numbers.")
    return tuple(_number({key: value}, key, 0) for value in values)


def rope_frequencies(
    dim: int, theta: float, scaling: RopeScaling, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Return the angle per position [dim / 2] in fp32, and the factor on cosine and sine."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    if scaling.kind == "dynamic" and dim > 2 and max_positions > scaling.original_max_positions:
        # NTK-aware scaling. The reference rescales with the length seen so far, which would change
        # keys that are already cached. One table for the longest served length avoids that.
        ratio = max_positions / scaling.original_max_positions
        grown = scaling.factor * ratio - (scaling.factor - 1)
        theta = theta * grown ** (dim / (dim - 2))
    frequencies = 1.0 / theta**exponent
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "proportional":
        frequencies[int(scaling.share * dim // 2) :] = 0
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(frequencies, dim, theta, scaling)
    if scaling.kind == "longrope":
        return _longrope(exponent, theta, scaling, max_positions)
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend those between."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    smooth = (scaling.original_max_positions / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    long = wavelength > scaling.original_max_positions / low
    short = wavelength < scaling.original_max_positions / high
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, blended))


def _yarn(
    frequencies: torch.Tensor, dim: int, theta: float, scaling: RopeScaling
) -> tuple[torch.Tensor, float]:
    """Interpolate low frequencies, keep high ones, and ramp between (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    if theta <= 1:
        raise ConfigError(f"config.json has rope_theta = {theta:g}; yarn needs a value above 1.")
    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low
    kept = 1 - (ramp / (high - low or 0.001)).clamp(0, 1)
    mixed = frequencies / scaling.factor * (1 - kept) + frequencies * kept
    return mixed, _yarn_factor(scaling)


def _yarn_factor(scaling: RopeScaling) -> float:
    """Return the factor on cosine and sine, as transformers 5.24 computes it."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = 0.1 * math.log(max(scaling.factor, 1.0))
    if scaling.mscale and scaling.mscale_all_dim:
        return (scaling.mscale * growth + 1.0) / (scaling.mscale_all_dim * growth + 1.0)
    return growth + 1.0


def _longrope(
    exponent: torch.Tensor, theta: float, scaling: RopeScaling, max_positions: int
) -> tuple[torch.Tensor, float]:
    """Divide each frequency by its own factor (arXiv 2402.13753).

    The reference chooses between two lists of factors by the length of each pass, which would
    change keys that are already cached. One choice for the longest served length avoids that.
    """
    original = scaling.original_max_positions
    key, factors = "short_factor", scaling.short_factors
    if max_positions > original:
        key, factors = "long_factor", scaling.long_factors
    if len(factors) != len(exponent):
        raise ConfigError(
            f"config.json has {len(factors)} numbers as {key}; {len(exponent)} are needed, one for "
            "each frequency."
        )
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 1.0
        if scaling.factor > 1 and original > 1:
            growth = math.log(scaling.factor) / math.log(original)
            attention_factor = math.sqrt(1 + growth)
    divisors = torch.tensor(factors, dtype=torch.float32, device="cpu")
    return 1.0 / (divisors * theta**exponent), attention_factor


def _tables(
    cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, *, pairs: bool
) -> torch.Tensor:
    """Return the tables [2, T, 1, 2N] of cos and sin [T, N]: see RotaryEmbedding."""

    def join(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts, -1).flatten(1) if pairs else torch.cat(parts, -1)

    count, half = cos.shape
    tables = torch.empty(2, count, 1, 2 * half, dtype=dtype, device=cos.device)
    tables[0, :, 0] = join([cos, cos])
    tables[1, :, 0] = join([-sin, sin])
    return tables


class RotaryEmbedding(PositionTables):
    """Cosines and signed sines per position, in the model's dtype (see ops/rotary.py).

    R, the number of rotated dimensions, is head_dim unless the scaling has a share below 1. With
    `pairs`, the tables are for apply_rotary_pairs.
    """

    # [2, max_positions, 1, R]: cosines, then sines. Of these, the first half is negated, or the
    # first of each pair.
    angles: torch.Tensor

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: RopeScaling,
        max_positions: int,
        dtype: torch.dtype,
        *,
        pairs: bool = False,
        sections: RotarySections | None = None,
    ) -> None:
        """With `pairs`, tables are for ops.rotary.apply_rotary_pairs; it excludes `sections`."""
        width = scaling.width(head_dim)
        frequencies, factor = rope_frequencies(width, theta, scaling, max_positions)
        super().__init__({"angles": (2, max_positions, 1, 2 * len(frequencies))}, dtype)
        self.frequencies = frequencies  # [R / 2], the angle per position
        self.pairs, self.sections = pairs, sections
        self._factor = factor
        if not self.is_planned:
            self.fill()

    def fill(self) -> None:
        positions = torch.arange(self.angles.shape[1], dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self.frequencies)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self.angles = _tables(cos, sin, self.angles.dtype, pairs=self.pairs)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T], or [3, T] with sections, -> cos, sin [T, 1, R], dense and gathered in one launch."""
        if positions.dim() > 1:
            assert self.sections is not None, "only sections have positions on three axes"
            tables = self.angles.index_select(1, positions.flatten()).unflatten(1, (AXES, -1))
            cos, sin = self.sections.select(tables).unbind(0)
            return cos, sin
        cos, sin = self.angles.index_select(1, positions).unbind(0)
        return cos, sin


class PairRotaryEmbedding(PositionTables):
    """Tables for ops.rotary.apply_rotary_pairs, which rotates adjacent dimensions. Made in fp64."""

    angles: torch.Tensor  # [2, max_positions, 1, dim]: cosines, then sines; even ones are negated

    def __init__(self, dim: int, theta: float, max_positions: int, dtype: torch.dtype) -> None:
        exponent = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
        super().__init__({"angles": (2, max_positions, 1, 2 * len(exponent))}, dtype)
        self.frequencies = theta**-exponent  # [dim / 2], the angle per position
        if not self.is_planned:
            self.fill()

    def fill(self) -> None:
        positions = torch.arange(self.angles.shape[1], dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, self.frequencies)
        self.angles = _tables(angles.cos(), angles.sin(), self.angles.dtype, pairs=True)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] -> cos, sin [T, 1, dim]."""
        cos, sin = self.angles.index_select(1, positions).unbind(0)
        return cos, sin
