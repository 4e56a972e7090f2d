"""Bottleneck adapters: ``f(h) = s · (act(h D + d) U + u)`` is added to a sublayer's output.

Houlsby et al. (2019) and Pfeiffer et al. (2020) as in ``adapters``, which calls them
``double_seq_bn`` and ``seq_bn``; and OpenDelta's. They differ in where an adapter sits, what it
reads, its activation and its initial values. Let h be the sublayer's output after its dropout, x
its input, and LN the layer norm that follows it in a post-norm model (in a pre-norm model LN = 1):

    houlsby    LN(x + h + f(h))             after attention and after feed-forward
    pfeiffer   LN(x + h + f(LN(x + h)))     after feed-forward; the same LN twice
    opendelta  h + f(h)                     of the output of a linear layer, before its dropout

D is ``[width, size]`` and U ``[size, width]``; both have biases.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from annotated_types import MinLen
from flax import nnx
from jax import Array

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.arguments import Count, Positive
from fedjax_peft.contracts.part import part
from fedjax_peft.models import layers
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import Residual
from fedjax_peft.models.modules import is_inside, replace_module, submodule, submodules
from fedjax_peft.numerics.random import stream
from fedjax_peft.peft.base import Adapted, Defaults, Method, find, listed
from fedjax_peft.support.errors import InputError

Place = Literal["attention", "feed_forward"]
Init = Literal["bert", "houlsby", "mam_adapter", "opendelta"]


class Placement(NamedTuple):
    """Where adapters sit and what they read."""

    places: tuple[str, ...]
    """Residual slots of the model; empty: the outputs of the family's ``opendelta`` layers."""
    after_norm: bool
    """Whether they read LN(x + h) instead of h."""


PLACEMENTS = {
    "houlsby": Placement(("attention", "feed_forward"), False),
    "pfeiffer": Placement(("feed_forward",), True),
    "opendelta": Placement((), False),
}


class Projection(nnx.Module):
    """A trained dense layer; it computes in the dtype of its input."""

    def __init__(self, kernel: Array):
        self.kernel = AdapterParam(kernel)
        self.bias = AdapterParam(jnp.zeros(kernel.shape[1]))

    def __call__(self, x: Array) -> Array:
        y = x @ self.kernel[...].astype(x.dtype)
        return y + self.bias[...].astype(x.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class Bottleneck(nnx.Module):
    """``f``, without the residual connection around it."""

    def __init__(
        self, width: int, size: int, key: Key, *, activation: str, init: str, scaling: float
    ):
        self.down = Projection(_start(init, stream(key, "down"), (width, size), up=False))
        self.up = Projection(_start(init, stream(key, "up"), (size, width), up=True))
        self.activation = layers.activation(activation)
        self.scaling = scaling

    def __call__(self, h: Array) -> Array:
        """Returns ``f(h)`` for ``h`` ``[..., width]``."""
        return self.scaling * self.up(self.activation(self.down(h)))


class AdaptedResidual(Adapted):
    """A residual slot with an adapter on the sublayer's output."""

    def __init__(self, base: Residual, adapter: Any, after_norm: bool):
        self.base = base
        self.adapter = adapter
        self.after_norm = after_norm

    def __call__(self, h: Array, x: Array, norm: Callable[[Array], Array] | None = None) -> Array:
        """Returns ``x + h + f(h)``, or ``x + h + f(norm(x + h))``; see ``Residual``."""
        read = h
        if self.after_norm:
            read = self.base(h, x, norm)
            read = read if norm is None else norm(read)
        return self.base(h + self.adapter(read), x, norm)


class AdaptedLinear(Adapted):
    """A linear layer with an adapter on its output."""

    def __init__(self, base: nnx.Linear, adapter: Any):
        self.base = base
        self.adapter = adapter

    def __call__(self, x: Array) -> Array:
        """Returns ``h + f(h)`` of the layer's output h."""
        h = self.base(x)
        return h + self.adapter(h)


@part
def houlsby(
    reduction_factor: Positive | None = None,
    *,
    size: Count | None = None,
    targets: str | Sequence[str] | None = None,
    activation: str = "swish",
    init: Init = "bert",
    scaling: float = 1.0,
) -> Method:
    """Adapters after attention and after feed-forward (``double_seq_bn`` in ``adapters``).

    Args:
      reduction_factor: the bottleneck is the width divided by this, 16 by default.
      size: the width of the bottleneck, instead of a factor.
      targets: other places, as in Hugging Face PEFT: residual slots, or linear layers, whose
        outputs are then adapted; by default all residual slots after attention and feed-forward.
      activation: its Hugging Face name.
      init: ``bert`` (N(0, 0.02²); the adapted model starts close to the given one), ``houlsby``
        (N(0, 0.01²) cut off at two deviations), ``mam_adapter`` (D uniform in ±1/sqrt(width), U
        zero: the adapted model starts equal to the given one) or ``opendelta`` (N(0, 0.01²)).
        Biases start at zero.
      scaling: the factor s.

    Raises:
      InputError: an impossible option here; a model without such places when it is attached.
    """
    options = bottleneck_options(reduction_factor, size, targets, activation, init, scaling)
    return _method("houlsby", PLACEMENTS["houlsby"], options)


@part
def pfeiffer(
    reduction_factor: Positive | None = None,
    *,
    size: Count | None = None,
    targets: str | Sequence[str] | None = None,
    activation: str = "relu",
    init: Init = "bert",
    scaling: float = 1.0,
) -> Method:
    """Adapters after feed-forward, reading its layer norm's output (``seq_bn`` in ``adapters``).

    The arguments are those of :func:`houlsby`.
    """
    options = bottleneck_options(reduction_factor, size, targets, activation, init, scaling)
    return _method("pfeiffer", PLACEMENTS["pfeiffer"], options)


@part
def opendelta(
    reduction_factor: Positive | None = None,
    *,
    size: Count | None = None,
    targets: str | Sequence[str] | None = None,
    activation: str = "gelu_new",
    init: Init = "opendelta",
    scaling: float = 1.0,
) -> Method:
    """Adapters on the output of the last linear layer of each sublayer, as in OpenDelta.

    The arguments are those of :func:`houlsby`, but the bottleneck is 16 by default, and the default
    targets are the linear layers that end the attention and feed-forward sublayers.
    """
    options = bottleneck_options(
        reduction_factor, size, targets, activation, init, scaling, default_size=16
    )
    return _method("opendelta", PLACEMENTS["opendelta"], options)


@part
def bottleneck(
    reduction_factor: Positive | None = None,
    *,
    size: Count | None = None,
    targets: str | Sequence[str] | None = None,
    places: Annotated[Sequence[Place], MinLen(1)] = ("attention", "feed_forward"),
    after_norm: bool = False,
    activation: str = "relu",
    init: Init = "bert",
    scaling: float = 1.0,
) -> Method:
    """Adapters in residual slots: the general form of Houlsby's and Pfeiffer's.

    The other arguments are those of :func:`houlsby`.

    Args:
      places: the residual slots to adapt: ``attention``, ``feed_forward`` or both.
      after_norm: read LN(x + h) instead of h.

    Raises:
      InputError: as :func:`houlsby`, or places beside targets.
    """
    if targets is not None and tuple(places) != PLACEMENTS["houlsby"].places:
        raise InputError(
            f"Both places = {[*places]} and targets are given; one of them says where the adapters"
            " are."
        )
    options = bottleneck_options(reduction_factor, size, targets, activation, init, scaling)
    return _method("bottleneck", Placement(tuple(places), after_norm), options)


def _method(name: str, placement: Placement, options: Mapping[str, Any]) -> Method:
    options = {**placement._asdict(), **options}

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        form = {name: options[name] for name in ("activation", "init", "scaling")}
        make = functools.partial(Bottleneck, **form)
        return attach_bottlenecks(module, defaults, key, head, options, make)

    return Method(name, options, attach)


def bottleneck_options(
    reduction_factor: float | None,
    size: int | None,
    targets: str | Sequence[str] | None,
    activation: str,
    init: str,
    scaling: float,
    *,
    default_size: int | None = None,
) -> dict[str, Any]:
    """Returns the checked options that all bottleneck methods have."""
    if reduction_factor is not None and size is not None:
        raise InputError(
            f"Both reduction_factor = {reduction_factor} and size = {size} are given; one of them"
            " says how wide the bottleneck is."
        )
    if reduction_factor is None and size is None:
        reduction_factor, size = (16, None) if default_size is None else (None, default_size)
    if scaling == 0:
        raise InputError(f"scaling = {scaling} must be a number other than 0.")
    layers.activation(activation)
    return {
        "reduction_factor": reduction_factor,
        "size": size,
        "targets": listed(targets),
        "activation": activation,
        "init": init,
        "scaling": float(scaling),
    }


def bottleneck_size(width: int, reduction_factor: float | None, size: int | None) -> int:
    """Returns the width of the bottleneck, rounded down as in ``adapters``, and at least 1."""
    if size is not None:
        return size
    assert reduction_factor is not None
    return max(1, int(width // reduction_factor))


def reduction_factor(width: int, size: int) -> float:
    """Returns a factor for which :func:`bottleneck_size` is ``size``."""
    exact = width / size
    return exact if width // exact == size else width / (size + 0.5)


def attach_bottlenecks(
    module: nnx.Module,
    defaults: Defaults,
    key: Key,
    head: Sequence[str],
    options: Mapping[str, Any],
    make: Callable[[int, int, Key], nnx.Module],
) -> nnx.Module:
    """Puts ``make(width, size, key)`` at every place that the options name; returns the module."""
    sites = _sites(module, defaults, head, options)
    if options["after_norm"] and not any(isinstance(site, Residual) for site in sites.values()):
        raise InputError(
            "Adapters that read the output of a layer norm (pfeiffer, after_norm = True) do so in"
            f" residual slots only, and no target is one ({min(sites)!r} is a linear layer): name"
            " such slots, or attach houlsby, which reads the output of a layer."
        )
    for path, site in sites.items():
        owner = submodule(module, path.rpartition(".")[0])
        if isinstance(site, Adapted) or isinstance(owner, Adapted):
            raise InputError(f"The submodule {path!r} already has a method attached.")
    for path, site in sites.items():
        slot = isinstance(site, Residual)
        width = site.width if slot else site.out_features
        size = bottleneck_size(width, options["reduction_factor"], options["size"])
        adapter = make(width, size, stream(key, path))
        if slot:
            new: Adapted = AdaptedResidual(site, adapter, options["after_norm"])
        else:
            new = AdaptedLinear(site, adapter)
        replace_module(module, path, new)
    return module


def _sites(
    module: nnx.Module, defaults: Defaults, head: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the linear layers and residual slots to adapt, by path."""
    targets, places = options["targets"], options["places"]
    if targets is not None or not places:
        where = defaults.get("opendelta") if targets is None else targets
        return find(module, where, (nnx.Linear, Residual, Adapted), head)
    slots = {
        path: slot
        for path, slot in sorted(submodules(module, Residual), key=lambda found: found[0])
        if not is_inside(path, head)
    }
    found = {path: slot for path, slot in slots.items() if slot.place in places}
    if not found:
        has = ", ".join(sorted({slot.place for slot in slots.values()})) or "none"
        raise InputError(
            f"Bottleneck adapters go into residual slots ({' or '.join(places)}) and this model"
            f" has {has}: put layers.Residual where the output of a sublayer joins the residual"
            " stream, or name linear layers, whose outputs are then adapted: targets=[...]."
        )
    return found


_DEVIATION = {"bert": 0.02, "houlsby": 0.01, "mam_adapter": None, "opendelta": 0.01}


def _start(init: str, key: Key, shape: tuple[int, int], *, up: bool) -> Array:
    """Returns the initial kernel ``[in, out]`` of the down or the up projection."""
    deviation = _DEVIATION[init]
    if deviation is None:
        bound = 1 / math.sqrt(shape[0])
        draw = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
        return jnp.zeros(shape) if up else draw(key, shape)
    if init == "houlsby":
        return deviation * jax.random.truncated_normal(key, -2, 2, shape)
    return deviation * jax.random.normal(key, shape)
