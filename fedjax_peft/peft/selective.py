"""Methods that add no parameters and train some of the model's own.

BitFit (Ben Zaken et al. 2022) trains the biases, ``layer_norm`` the layer norms, ``full`` all
parameters, and ``head_only`` only the head. A trained parameter becomes an ``AdapterParam`` of the
same name and value, on the same module.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax import nnx

from fedjax_peft.contracts import Key
from fedjax_peft.contracts.part import part
from fedjax_peft.models.base import AdapterParam
from fedjax_peft.models.layers import RMSNorm
from fedjax_peft.models.modules import is_inside, leaves, submodules
from fedjax_peft.models.quantized import QuantizedLinear
from fedjax_peft.peft.base import Defaults, Method, find, listed
from fedjax_peft.support.errors import InputError

Chosen = Callable[[str, nnx.Module, str], bool]
"""(module path, module, name of its parameter) -> whether it is trained."""


@part
def bitfit(targets: str | Sequence[str] | None = None) -> Method:
    """Trains biases only (BitFit, Ben Zaken et al. 2022), those of layer norms included.

    Args:
      targets: the modules whose biases are trained, named as in Hugging Face PEFT; by default all
        modules with a bias. Section 4 of the paper finds ``["query", "intermediate.dense"]`` enough
        in BERT.

    Raises:
      InputError: when it is attached, targets without a bias, or a module that is already adapted.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        _refuse_adapted(module)
        owners = {path: owner for path, owner, name in _parameters(module, head) if name == "bias"}
        if targets is not None:
            named = find(module, targets, tuple({type(m) for m in owners.values()}), head)
            owners = {path: owner for path, owner in owners.items() if path in named}
        return _train(module, head, lambda path, _, name: name == "bias" and path in owners, "bias")

    return Method("bitfit", {"targets": listed(targets)}, attach)


@part
def layer_norm() -> Method:
    """Trains scales and biases of all layer norms and RMS norms, as PEFT's LN tuning.

    Raises:
      InputError: when it is attached, a module without layer norms, or one already adapted.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        norms = nnx.LayerNorm | RMSNorm
        return _train(module, head, lambda _, owner, __: isinstance(owner, norms), "layer norm")

    return Method("layer_norm", {}, attach)


@part
def full() -> Method:
    """Full fine-tuning: all parameters are trained. A table that is also the head counts once.

    Raises:
      InputError: when it is attached, a module that has nothing but its head or is already adapted.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        if any(submodules(module, QuantizedLinear)):
            raise InputError(
                "Full fine-tuning trains all weights, and those of this model are quantised, so"
                " they never change. Load the model without quantize, or attach an adapter."
            )
        return _train(module, head, lambda *_: True, "parameter")

    return Method("full", {}, attach)


@part
def head_only() -> Method:
    """Trains the head alone, on a frozen backbone (linear probing).

    Raises:
      InputError: when it is attached, a model without a head, or one that is already adapted.
    """

    def attach(module: nnx.Module, defaults: Defaults, key: Key, head: Sequence[str]) -> nnx.Module:
        _refuse_adapted(module)
        if not head:
            raise InputError("head_only would train nothing: the model has no head of its own.")
        return module

    return Method("head_only", {}, attach)


def _train(module: nnx.Module, head: Sequence[str], chosen: Chosen, what: str) -> nnx.Module:
    """Marks the chosen parameters outside the head as trained; returns the module."""
    _refuse_adapted(module)
    # By identity, and replaced in every module that holds it, so that tied parameters stay tied.
    marked: dict[int, tuple[Any, AdapterParam]] = {}
    for path, owner, name in _parameters(module, head):
        parameter = getattr(owner, name)
        if chosen(path, owner, name):
            marked.setdefault(id(parameter), (parameter, AdapterParam(parameter[...])))
    if not marked:
        raise InputError(f"The model has no {what} outside its head that could be trained.")
    for _, owner, name in _parameters(module):
        parameter = getattr(owner, name)
        if id(parameter) in marked:
            setattr(owner, name, marked[id(parameter)][1])
    return module


def _refuse_adapted(module: nnx.Module) -> None:
    for name in leaves(module, AdapterParam):
        raise InputError(f"The model is already adapted: {name!r} is trained.")


def _parameters(
    module: nnx.Module, head: Sequence[str] = ()
) -> Iterator[tuple[str, nnx.Module, str]]:
    """Yields (module path, module, parameter name) of every parameter outside the head."""
    for path, owner in submodules(module):
        if not is_inside(path, head):
            for name, value in list(vars(owner).items()):
                if isinstance(value, nnx.Param):
                    yield path, owner, name
