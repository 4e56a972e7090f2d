"""Rotary positions (RoPE, Su et al. 2021), with the scalings that current configs have.

A head of width ``d`` is rotated in ``d / 2`` planes; plane ``i`` by the angle ``position · f_i``,
with ``f_i = theta^(-2i / d)``. Scalings for texts beyond the length of the pretraining change f:

* ``linear``: ``f / factor`` (position interpolation, Chen et al. 2023).
* ``dynamic``: a larger ``theta``, which depends on the length of the text (dynamic NTK).
* ``yarn``: a ramp between ``f`` and ``f / factor`` over the planes, and a factor on cosines and
  sines (Peng et al. 2024).
* ``longrope``: a divisor for each plane; texts beyond the old limit have another list of divisors
  (Ding et al. 2024).
* ``llama3``: ``f / factor`` for long wavelengths, ``f`` for short ones, a ramp between them.

The formulas and the defaults are those of ``transformers``' ``modeling_rope_utils``, with one
difference: the length on which ``dynamic`` and ``longrope`` depend is that of a row, where
``transformers`` takes the longest row of the batch. Frequencies are computed in float64 and rounded
to float32 once; angles are float32.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one kind of layers. It is hashable, so a module can hold it."""

    kind: str
    theta: float
    width: int
    """The width of a head, even."""
    limit: int
    """``max_position_embeddings``."""
    options: tuple[tuple[str, Any], ...] = ()
    """The other fields of ``rope_parameters``."""

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an option; ``default`` if it is absent or None."""
        value = dict(self.options).get(name)
        return default if value is None else value

    @property
    def exponents(self) -> np.ndarray:
        """``2i / d`` for every plane, float64 ``[width / 2]``."""
        return np.arange(0, self.width, 2) / self.width

    def tables(self, positions: Array) -> tuple[Array, Array]:
        """Returns cosines and sines, float32 ``[rows, length, 1, width / 2]``.

        Args:
          positions: int ``[rows, length]``.
        """
        frequencies, scale = KINDS[self.kind](self, positions)
        frequencies = jnp.asarray(frequencies, jnp.float32).reshape(-1, 1, self.width // 2)
        angles = positions.astype(jnp.float32)[..., None] * frequencies
        return scale * jnp.cos(angles)[:, :, None], scale * jnp.sin(angles)[:, :, None]


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Returns queries or keys ``[batch, length, heads, width]`` after the rotation.

    The two coordinates of a plane are ``i`` and ``i + width / 2``, as in Hugging Face's models.
    They are computed in float32.
    """
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rope(
    parameters: Mapping[str, Any] | None,
    *,
    theta: float | None,
    width: int,
    limit: int,
    default_theta: float = 10_000.0,
) -> Rope:
    """Returns the rotation of a config, checked.

    Args:
      parameters: ``rope_parameters`` of transformers 5, or the older ``rope_scaling``.
      theta: the older field ``rope_theta``; ``parameters`` takes precedence.
      limit: ``max_position_embeddings``.
    """
    fields = {name: x for name, x in dict(parameters or {}).items() if x is not None}
    kinds = [fields.pop(name, None) for name in ("rope_type", "type")]
    kind = str(kinds[0] or kinds[1] or "default")
    if kind not in KINDS:
        raise InputError(f"The rope_type {kind!r} is not implemented. {nearest(kind, KINDS)}")
    if width % 2 or width < 4:
        raise InputError(f"Rotary positions need heads of an even width from 4, not {width}.")
    if kind in _WITH_ORIGIN:
        fields.setdefault("original_max_position_embeddings", limit)
    fields.setdefault("rope_theta", theta or default_theta)
    for name in ("rope_theta", *_NEEDED.get(kind, ()), *(n for n in _NUMBERS if n in fields)):
        _check(kind, name, fields.get(name), width // 2 if name in _LISTS else None)
    for name in ("rope_theta", "original_max_position_embeddings"):
        if fields.get(name, 2) <= 1:
            raise InputError(f"{name} = {fields[name]} of the model config must be above 1.")
    if kind == "dynamic" and fields["factor"] < 1:
        raise InputError(f"factor = {fields['factor']} of the rotation must be at least 1.")
    if kind == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise InputError("high_freq_factor of the model config must be above low_freq_factor.")
    if fields.pop("partial_rotary_factor", 1) != 1:
        raise InputError("A partial_rotary_factor other than 1 is not implemented.")
    options = tuple(
        (name, tuple(x) if isinstance(x, list) else x)
        for name, x in sorted(fields.items())
        if name in (*_NUMBERS, *_LISTS, "truncate")
    )
    return Rope(kind, float(fields["rope_theta"]), width, limit, options)


def _check(kind: str, name: str, value: Any, count: int | None) -> None:
    """Raises InputError unless a field is positive: a number, or a list of ``count`` numbers."""

    def positive(x: Any) -> bool:
        return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf

    if count is None:
        fine, what = positive(value), "a positive number"
    else:
        fine = isinstance(value, list | tuple) and len(value) == count and all(map(positive, value))
        what = f"a list of {count} positive numbers, one for each plane"
    if not fine:
        raise InputError(
            f"The rope_parameters of the model config have {name} = {show(value)}; for {kind} it"
            f" must be {what}."
        )


# ------------------------------------------------------------- frequencies, a factor on cos and sin


_Frequencies = tuple[Any, float]
"""(float ``[width / 2]`` or ``[rows, width / 2]``, a factor of the cosines and sines)."""


def _length(positions: Array) -> Array:
    """Returns the positions that each row needs, ``[rows, 1]``."""
    return jnp.max(positions, axis=1, keepdims=True) + 1


def _dynamic(r: Rope, positions: Array) -> _Frequencies:
    factor, n = r.get("factor"), r.width
    length = jnp.maximum(_length(positions), r.limit).astype(jnp.float32)
    stretch = (factor * length / r.limit - (factor - 1)) ** (n / (n - 2))
    exponents = jnp.asarray(r.exponents, jnp.float32)[None]
    return jnp.asarray(r.theta**-r.exponents, jnp.float32)[None] * stretch**-exponents, 1.0


def _yarn(r: Rope, positions: Array) -> _Frequencies:
    origin = r.get("original_max_position_embeddings")
    factor = r.get("factor", r.limit / origin)

    def plane(rotations: float) -> float:
        """Returns the plane that turns this often over the original length."""
        turns = math.log(origin / (rotations * 2 * math.pi))
        return r.width * turns / (2 * math.log(r.theta))

    low, high = plane(r.get("beta_fast", 32)), plane(r.get("beta_slow", 1))
    if r.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r.width - 1)
    high += 0.001 if low == high else 0
    interpolated = np.clip((np.arange(r.width // 2) - low) / (high - low), 0, 1)
    plain = r.theta**-r.exponents
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    return frequencies, _yarn_scale(r, factor)


def _yarn_scale(r: Rope, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    above, below = r.get("mscale"), r.get("mscale_all_dim")
    inferred = scale(above) / scale(below) if above and below else scale(1.0)
    return float(r.get("attention_factor", inferred))


def _longrope(r: Rope, positions: Array) -> _Frequencies:
    origin = r.get("original_max_position_embeddings")
    factor = r.get("factor", r.limit / origin)
    inferred = math.sqrt(1 + math.log(factor) / math.log(origin)) if factor > 1 else 1.0
    plain = r.theta**-r.exponents
    short, long = (
        jnp.asarray(plain / np.asarray(r.get(name)), jnp.float32)[None]
        for name in ("short_factor", "long_factor")
    )
    frequencies = jnp.where(_length(positions) > origin, long, short)
    return frequencies, float(r.get("attention_factor", inferred))


def _llama3(r: Rope, positions: Array) -> _Frequencies:
    origin, factor = r.get("original_max_position_embeddings"), r.get("factor")
    low, high = r.get("low_freq_factor"), r.get("high_freq_factor")
    plain = r.theta**-r.exponents
    turns = origin * plain / (2 * math.pi)  # over the original length
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / factor + kept * plain, 1.0


KINDS: dict[str, Callable[[Rope, Array], _Frequencies]] = {
    "default": lambda r, positions: (r.theta**-r.exponents, 1.0),
    "linear": lambda r, positions: (r.theta**-r.exponents / r.get("factor"), 1.0),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
"""``rope_type`` -> (rotation, positions) -> the frequencies of the planes, and a factor."""

_WITH_ORIGIN = ("yarn", "longrope", "llama3")
_LISTS = ("short_factor", "long_factor")
_NUMBERS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
)
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": _LISTS,
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
