"""LoRA: ``y = x W + s · (x A) B`` with frozen ``W`` (Hu et al. 2021), and starts from W itself.

Flax orientation: ``lora_a`` is ``[in, rank]`` and ``lora_b`` is ``[rank, out]``, the transposes of
Hugging Face PEFT's ``lora_A`` and ``lora_B``.
"""

import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, Fraction, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterConst, AdapterParam
from fedjax_peft.models.layers import Dropout, FusedLinear
from fedjax_peft.models.quantized import QuantizedLinear
from fedjax_peft.numerics.precision import is_wider, split
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import (
    Adapted,
    Defaults,
    Method,
    Targets,
    check_pattern,
    find_linear,
    in_layers,
    listed,
    replace_module,
)
from fedjax_peft.peft.lora_starts import (
    activations_missing,
    minor_factors,
    orthonormal_factors,
    principal_factors,
    random_factors,
)
from fedjax_peft.peft.quantized_start import quantized_start
from fedjax_peft.support.errors import InputError, nearest

_SHAPED = ("svd", "pissa", "milora", "qr", "loftq")
"""Starts that change the frozen kernels too."""


class LowRank(nnx.Module):
    """``x -> s · (x A) B``.

    ``lora_scale`` (``[rank]``) holds ``s`` for every direction. In one stacked pytree, a client of
    a smaller rank has zeros there.
    """

    def __init__(self, a: Array, b: Array, scale: float, dropout: float):
        self.lora_a = AdapterParam(a)
        self.lora_b = AdapterParam(b)
        self.lora_scale = AdapterConst(jnp.full((a.shape[1],), scale, jnp.float32))
        self.dropout = Dropout(dropout)

    def update(self, x: Array, dtype: Any) -> Array:
        """Returns the change of the layer's output for an input ``[..., in]``."""
        a, b = self.lora_a[...].astype(dtype), self.lora_b[...].astype(dtype)
        # s scales B, which is small and does not depend on the tokens.
        b = b * self.lora_scale[...].astype(dtype)[:, None]
        return (self.dropout(x).astype(dtype) @ a) @ b

    def product(self) -> Array:
        """Returns ``s · AB``, ``[in, out]``, in float32."""
        b = self.lora_b[...] * self.lora_scale[...][:, None]
        return jnp.matmul(self.lora_a[...], b, precision="highest")


def frozen_output(base: nnx.Linear, x: Array) -> Array:
    """Returns the output of a frozen layer for ``x`` ``[..., in]``.

    A kernel that is wider than the compute dtype is used in full, as a sum of two narrow ones.
    Algorithms that add to frozen weights (FLoRA, FedEx-LoRA) make such kernels, and a plain layer
    would round most of the sum away. A quantised kernel never changes, and computes by itself. One
    that is trained (``lora_with_base``) is rounded, as in full fine-tuning.
    """
    dtype = base.dtype
    plain = isinstance(base, QuantizedLinear) or isinstance(base.kernel, AdapterParam)
    if dtype is None or plain or not is_wider(base.kernel[...], dtype):
        return base(x)
    kernel = base.kernel[...]
    # In one product with twice the inputs, the parts are added before the output is rounded.
    x = x.astype(dtype)
    y = jnp.concatenate([x, x], axis=-1) @ jnp.concatenate(split(kernel, dtype))
    if base.bias is None:
        return y
    return y + jnp.broadcast_to(base.bias[...].astype(dtype), y.shape)


class LoRALinear(LowRank, Adapted):
    """A linear layer with a low-rank update. ``base`` is frozen."""

    def __init__(self, base: Any, a: Array, b: Array, scale: float, dropout: float):
        super().__init__(a, b, scale, dropout)
        self.base = base

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = frozen_output(self.base, x)
        return y + self.update(x, y.dtype)

    def merged(self) -> nnx.Module:
        """Returns the linear layer of ``W + s · AB``."""
        return self.with_kernel(self.base.kernel[...] + self.product())


class FusedLoRALinear(Adapted):
    """A fused projection with a low-rank update of some of its parts."""

    def __init__(self, base: FusedLinear, updates: Mapping[str, LowRank]):
        self.base = base
        self.parts = tuple(updates)
        for name, update in updates.items():
            setattr(self, name, update)

    def __call__(self, x: Array) -> Array:
        """Returns the layer's output for ``x`` ``[..., in]``."""
        y = self.base(x)
        updates = [
            getattr(self, part).update(x, y.dtype) if part in self.parts else piece
            for part, piece in zip(self.base.parts, self._pieces(jnp.zeros_like(y)), strict=True)
        ]
        return y + jnp.concatenate(updates, axis=-1)

    def merged(self) -> nnx.Module:
        """Returns the linear layer with the updates added to its kernel."""
        kernel = self.base.kernel[...]
        pieces = [
            piece + getattr(self, part).product() if part in self.parts else piece
            for part, piece in zip(self.base.parts, self._pieces(kernel), strict=True)
        ]
        return self.with_kernel(jnp.concatenate(pieces, axis=-1))

    def _pieces(self, x: Array) -> list[Array]:
        return jnp.split(x, len(self.base.parts), axis=-1)


@part
def lora(
    rank: Count = 8,
    *,
    alpha: Positive | None = None,
    targets: str | Sequence[str] | None = None,
    init: Literal[
        "kaiming", "gaussian", "svd", "pissa", "milora", "qr", "loftq", "eva"
    ] = "kaiming",
    dropout: Fraction = 0.0,
    rslora: bool = False,
    rank_pattern: Mapping[str, Count] | None = None,
    alpha_pattern: Mapping[str, Positive] | None = None,
    parts: Sequence[str] | None = None,
    loftq_iterations: Count = 1,
    layers: Sequence[int] | None = None,
) -> Method:
    """Low-rank adapters (LoRA, Hu et al. 2021); with ``init="svd"`` those of FeDeRA.

    Args:
      rank: the number of directions r.
      alpha: the scale is s = alpha / r (``rslora``: alpha / sqrt(r)); by default alpha = rank, so
        s = 1 except where ``rank_pattern`` gives another r.
      targets: which linear layers, as in Hugging Face PEFT (``"all-linear"``: all but the head);
        by default query and value.
      init: ``kaiming`` (PEFT's default: A uniform in ±1/sqrt(in), B zero), ``gaussian``
        (A ~ N(0, 1/r²), B zero), ``svd`` (FeDeRA, Eq 6-10: the r largest singular directions of
        W split evenly between A and B, the residual W - s·AB frozen; outputs do not change),
        ``pissa`` (Meng et al. 2024: another name of the same start), ``milora`` (Wang et al. 2025:
        the same with the r smallest singular directions),
        ``qr`` (OLoRA, Büyükakyüz 2024, and ILoRA, Zhou et al. 2025: the same with the first r
        directions of a QR decomposition of Wᵀ, B with orthonormal rows), ``loftq`` (Li et al.
        2024: factors that make up for the quantisation of the base), or ``eva`` (Paischer et al.
        2025: ``fp.peft.activation_start`` sets A, in a config the run does). On a quantised base
        ``svd`` is QPiSSA. Starts from W read the checkpoint of a quantised base again.
      dropout: the dropout rate on the adapter's input.
      rslora: rank-stabilised scale (Kalajdzievski 2023).
      rank_pattern: other ranks for some layers, as in Hugging Face PEFT: {end of a path, or a
        regular expression for it: rank}.
      alpha_pattern: other alphas, in the same form.
      parts: the parts of a fused projection (GPT-2's ``c_attn``: q, k and v) that each get an
        update, as in ``adapters``; by default one update spans all parts, as in Hugging Face PEFT.
      loftq_iterations: iterations of ``init="loftq"``; 1 as in Hugging Face PEFT, 5 in the paper.
      layers: the numbers of the blocks that are adapted (Hugging Face PEFT's
        ``layers_to_transform``); negative ones count from the end, so ``[-2, -1]`` are the last
        two. By default all blocks.

    Raises:
      InputError: an impossible option here; a target, pattern, part or layer that matches nothing,
        or a rank above a matrix's side, when it is attached.
    """
    options = low_rank_options(
        rank,
        alpha=alpha,
        targets=targets,
        init=init,
        dropout=dropout,
        rslora=rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        parts=parts,
    )
    if init == "loftq":
        options["loftq_iterations"] = loftq_iterations
    if layers is not None:
        options["layers"] = tuple(layers)
    more: dict[str, Any] = {"start_missing": activations_missing} if init == "eva" else {}
    return low_rank_method("lora", options, LoRALinear, start_shapes_frozen=init in _SHAPED, **more)


class LowRankOptions(TypedDict, total=False):
    """The arguments of all low-rank methods besides ``rank``; see :func:`lora`."""

    alpha: Positive | None
    targets: str | Sequence[str] | None
    init: Literal["kaiming", "gaussian"]
    dropout: Fraction
    rslora: bool
    rank_pattern: Mapping[str, Count] | None
    alpha_pattern: Mapping[str, Positive] | None


def low_rank_options(
    rank: int,
    *,
    alpha: float | None = None,
    targets: Targets = None,
    init: str = "kaiming",
    dropout: float = 0.0,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    parts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Returns the checked options of a low-rank method, for :func:`low_rank_method`."""
    ranks, alphas = dict(rank_pattern or {}), dict(alpha_pattern or {})
    for option, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern in patterns:
            check_pattern(option, pattern, "the end of a path", _FORM)
    return {
        "rank": rank,
        "alpha": float(rank if alpha is None else alpha),
        "targets": listed(targets),
        "init": init,
        "dropout": dropout,
        "rslora": rslora,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "parts": None if parts is None else tuple(parts),
    }


Make = TypeVar("Make", bound=Callable[..., Method])


def takes_low_rank_options(make: Make) -> Make:
    """Returns a method's function whose signature lists :class:`LowRankOptions` one by one.

    Configs, the reference and editors read it from there.
    """
    signature, shared = inspect.signature(make), inspect.signature(low_rank_options).parameters
    kinds = typing.get_type_hints(LowRankOptions, include_extras=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [shared[name].replace(annotation=kind) for name, kind in kinds.items()]
    make.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    make.__annotations__ |= kinds
    return make


def low_rank_method(
    name: str,
    options: Mapping[str, Any],
    layer: Callable[..., nnx.Module],
    finish: Callable[[str, Any, Key], None] | None = None,
    **more: Any,
) -> Method:
    """Returns the method that puts a low-rank layer at every target.

    Args:
      options: of :func:`low_rank_options`, and perhaps further ones.
      layer: ``layer(base, a, b, scale, dropout)`` is the new layer.
      finish: ``finish(path, layer, key)`` sets what the layer has besides; ``key`` is the model's.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        for path, new in _attach_low_rank(module, defaults, key, head, options, layer).items():
            if finish is not None:
                finish(path, new, key)
        return module

    return Method(name, options, attach, **more)


def _attach_low_rank(
    module: nnx.Module,
    defaults: Defaults,
    key: Key,
    head: Sequence[str],
    options: Mapping[str, Any],
    layer: Callable[..., nnx.Module],
) -> dict[str, nnx.Module]:
    """Puts a low-rank layer at every target; returns the new layers by module path."""
    sites = find_linear(module, options["targets"], defaults, head)
    sites = in_layers(module, sites, options.get("layers"))
    for pattern in (*options["rank_pattern"], *options["alpha_pattern"]):
        if not any(_matches(pattern, path) for path in sites):
            raise InputError(
                f"The pattern {pattern!r} matches no target. {nearest(pattern, sites)}"
            )
    # Whole kernels get factors, or parts of kernels, under the names of the parts.
    shapes, ranks, scales = {}, {}, {}
    for path, site in sites.items():
        for name, kernel in _shapes(path, site, options["parts"]).items():
            r = by_pattern(options["rank_pattern"], path, options["rank"])
            if r > min(kernel.shape):
                n_in, n_out = kernel.shape
                raise InputError(
                    f"rank = {r} is above the smaller side of {path!r} ({n_in}x{n_out})."
                )
            alpha = by_pattern(options["alpha_pattern"], path, options["alpha"])
            shapes[name], ranks[name] = kernel.shape, r
            scales[name] = scaling(r, alpha, options["rslora"])
    if options["init"] in _SHAPED:
        factors = _shaped_start(sites, options, ranks, scales)
    else:
        factors = {
            name: random_factors(options["init"], shape, ranks[name], stream(key, name))
            for name, shape in shapes.items()
        }
    dropout = options["dropout"]
    made: dict[str, nnx.Module] = {}
    for path, site in sites.items():
        if path in factors:
            made[path] = layer(site, *factors[path], scales[path], dropout)
        else:
            names = {n.rpartition(".")[2]: n for n in factors if n.startswith(f"{path}.")}
            made[path] = FusedLoRALinear(
                site, {p: LowRank(*factors[n], scales[n], dropout) for p, n in names.items()}
            )
        replace_module(module, path, made[path])
    return made


def _shaped_start(
    sites: Mapping[str, nnx.Linear],
    options: Mapping[str, Any],
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
) -> dict[str, tuple[Array, Array]]:
    """Returns the factors of a start that changes the frozen kernels too, and changes those."""
    parts, init = options["parts"], options["init"]
    decompose = {"qr": orthonormal_factors, "milora": minor_factors}.get(init, principal_factors)
    plain = {p: site for p, site in sites.items() if not isinstance(site, QuantizedLinear)}
    if init == "loftq" and plain:
        raise InputError(
            f"init = 'loftq' makes up for the quantisation of the frozen weights, and those of"
            f" {next(iter(plain))!r} are not quantised: load the model with quantize='nf4', or use"
            " init='svd'."
        )
    pieces: dict[str, Array] = {}
    for path, site in plain.items():
        pieces |= _slices(path, site, parts)
    factors, residuals = decompose(pieces, ranks, scales)
    for path, site in plain.items():
        rest = _slices(path, site, parts, whole=True)
        columns = [residuals.get(name, kernel) for name, kernel in rest.items()]
        site.kernel.set_value(jnp.concatenate(columns, axis=1))
    for path, site in sites.items():
        if not isinstance(site, QuantizedLinear):
            continue

        def truncated(
            matrix: Array, path: str = path, site: nnx.Linear = site
        ) -> tuple[dict[str, tuple[Array, Array]], Array]:
            chosen = _slices(path, site, parts, kernel=matrix)
            found, residuals = decompose(chosen, ranks, scales)
            rest = _slices(path, site, parts, whole=True, kernel=matrix)
            columns = [residuals.get(name, piece) for name, piece in rest.items()]
            return found, jnp.concatenate(columns, axis=1)

        iterations = options.get("loftq_iterations", 1)
        factors |= quantized_start(path, site, init, iterations, truncated)
    return factors


def _shapes(
    path: str, site: nnx.Linear, parts: Sequence[str] | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of :func:`_slices`; a quantised kernel is not dequantised for them."""
    kernel = jax.ShapeDtypeStruct(site.kernel.shape, jnp.float32)
    found: dict[str, jax.ShapeDtypeStruct] = jax.eval_shape(
        lambda kernel: _slices(path, site, parts, kernel=kernel), kernel
    )
    return found


def _slices(
    path: str,
    site: nnx.Linear,
    parts: Sequence[str] | None,
    *,
    whole: bool = False,
    kernel: Array | None = None,
) -> dict[str, Array]:
    """Returns the kernels of a layer by name: one, or one for each part (all if ``whole``).

    With ``kernel``, those of another matrix of its shape.
    """
    kernel = site.kernel[...] if kernel is None else kernel
    if parts is None:
        return {path: kernel}
    known = getattr(site, "parts", ())
    if not parts:
        raise InputError(
            "parts = [] names no part, so nothing would be trained: leave it out to adapt the whole"
            " projection."
        )
    for one in parts:
        if one not in known:
            raise InputError(
                f"The submodule {path!r} has no part {one!r}."
                + (f" {nearest(one, known)}" if known else " It is not a fused projection.")
            )
    pieces = zip(known, jnp.split(kernel, len(known), axis=1), strict=True)
    return {f"{path}.{name}": piece for name, piece in pieces if whole or name in parts}


_FORM = r"(.*\.)?({})$"
"""The expression that a pattern of ranks or alphas stands for, in Hugging Face PEFT."""


def _matches(pattern: str, path: str) -> bool:
    return re.match(_FORM.format(pattern), path) is not None


def by_pattern(patterns: Mapping[str, Any], path: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches a path, by Hugging Face PEFT's rule."""
    return next((value for key, value in patterns.items() if _matches(key, path)), default)


def scaling(rank: int, alpha: float, rslora: bool) -> float:
    """Returns LoRA's scale s."""
    return alpha / (math.sqrt(rank) if rslora else rank)
