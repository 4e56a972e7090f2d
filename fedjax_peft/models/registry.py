"""The model families, and the functions that need only a ``config.json``. This file reads no files.

:data:`FAMILIES` maps ``model_type`` to a family. From a config and a head come the module, its leaf
shapes and its Hugging Face class; :func:`random_model` gives it random weights.
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from fedjax_peft.contracts.part import data_part
from fedjax_peft.models import (
    bert,
    deberta,
    dinov2,
    distilbert,
    gemma2,
    gemma3,
    gpt2,
    llama,
    mistral,
    modernbert,
    qwen2,
    qwen3,
    roberta,
    scratch,
    smollm3,
    vit,
)
from fedjax_peft.models.attention import AttentionForm
from fedjax_peft.models.base import Model, bind
from fedjax_peft.models.blocks import Remat, set_options
from fedjax_peft.models.family import Family, Kind
from fedjax_peft.models.heads import Head
from fedjax_peft.models.modules import is_inside, leaves, replace_module, submodule
from fedjax_peft.models.quantized import (
    Quantization,
    QuantizedKernel,
    QuantizedLinear,
    check_stored,
    layers_to_quantize,
    quantize_kernel,
)
from fedjax_peft.numerics import tree
from fedjax_peft.numerics.random import stream
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.memory import require

Dtype = Literal["float32", "bfloat16"]
"""The compute dtype of a backbone."""

FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "modernbert": modernbert.FAMILY,
    "deberta-v2": deberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "gpt2": gpt2.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "smollm3": smollm3.FAMILY,
    "roberta": roberta.FAMILY,
    "xlm-roberta": roberta.XLM_ROBERTA,
    "camembert": roberta.CAMEMBERT,
    "vit": vit.FAMILY,
    "dinov2": dinov2.FAMILY,
    "rnn": scratch.RNN,
    "lstm": scratch.LSTM,
    "cnn": scratch.CNN,
}
"""The families by ``model_type`` of ``config.json``."""

_EXPERTS, _IMAGES = "it is a mixture of experts", "it reads images too"
_RELATIVES = {
    "gemma": ("it is the first version of Gemma", "gemma2"),
    "gemma3": (f"{_IMAGES}, unlike gemma-3-1b", "gemma3_text"),
    "gemma3n": (_IMAGES, "gemma3_text"),
    "llama4": (f"{_EXPERTS}, unlike Llama 2 and 3", "llama"),
    "llama4_text": (f"{_EXPERTS}, unlike Llama 2 and 3", "llama"),
    "mistral3": (_IMAGES, "mistral"),
    "mixtral": (_EXPERTS, "mistral"),
    "phi3": ("its projections are fused", "llama"),
    "qwen2_5_vl": (_IMAGES, "qwen2"),
    "qwen2_moe": (_EXPERTS, "qwen2"),
    "qwen2_vl": (_IMAGES, "qwen2"),
    "qwen3_moe": (_EXPERTS, "qwen3"),
    "qwen3_vl": (_IMAGES, "qwen3"),
}
"""Model type that is not supported -> (the difference, the nearest supported type)."""

_METADATA = {
    *("model_type", "architectures", "id2label", "label2id", "num_labels", "dtype", "torch_dtype"),
    *("transformers_version", "_name_or_path"),
}
"""Fields of ``config.json`` that do not affect the model."""

_MAX_LAYERS = 1000
"""The largest number of layers of a model. Layers are built in Python, one by one, before the size
of the model is checked."""
_MAX_NUMBER = 2**31 - 1
"""Largest value of any other whole number in a config."""


@data_part
def random_model(
    config: Mapping[str, Any],
    *,
    head: Head,
    dtype: Dtype = "float32",
    quantize: Quantization | None = None,
    remat: Remat = "none",
    scan_layers: bool = False,
    attention: AttentionForm = "auto",
    dropout: float | None = None,
    seed: int = 0,
) -> Model:
    """Returns a model with random weights, for benchmarks and tests.

    Args:
      config: the fields of a ``config.json``, such as ``{"model_type": "bert", ...}``.
      head: what to predict, such as ``heads.classification(20)``.
      dtype: compute dtype of the backbone, as for :func:`fedjax_peft.load_model`.
      quantize: as for :func:`fedjax_peft.load_model`.
      remat: likewise.
      scan_layers: likewise.
      attention: likewise.
      dropout: replaces every dropout rate of the config.
      seed: the seed of the weights.

    Raises:
      InputError: an unsupported config, a head that the family does not have, or too little memory.
    """
    recipe: dict[str, Any] = {"made_by": "random_model", "config": dict(config)}
    recipe |= {"head": head.kind, "dtype": str(dtype), "quantize": quantize, "remat": remat}
    recipe |= {"scan_layers": scan_layers, "attention": attention, "dropout": dropout}
    recipe |= {"seed": int(seed)}
    family, parsed = parse_config(config, dropout)
    abstract = abstract_module(config, head, dtype=dtype, dropout=dropout)
    set_options(abstract, remat, scan_layers, attention)
    paths = find_kind(family, head, config).head
    shapes, std = leaf_shapes(abstract), parsed.initializer_range
    hold = holder(abstract, paths, dtype, quantize)
    return bind_values(
        initialise(shapes, std, seed, hold),
        abstract,
        head=paths,
        original=lambda name: initialise({name: shapes[name]}, std, seed)[name],
        splits=family.splits,
        name=f"random {config['model_type']}",
        config=dict(config),
        labels=head.labels,
        dtype=jnp.dtype(dtype),
        recipe=recipe,
    )


# ---------------------------------------------------------------------------- from config to module


def abstract_module(
    config: Mapping[str, Any], head: Head, *, dtype: Dtype = "float32", dropout: float | None = None
) -> nnx.Module:
    """Returns a new module of a ``config.json`` with shapes instead of arrays."""
    return nnx.merge(*module_shapes(config, head, dtype=dtype, dropout=dropout)[:2], copy=True)


def module_shapes(
    config: Mapping[str, Any], head: Head, *, dtype: Dtype = "float32", dropout: float | None = None
) -> tuple[Any, nnx.State, tuple[str, ...]]:
    """Returns a module's definition, the shapes of its arrays, and the paths of its head."""
    family, parsed = parse_config(config, dropout)
    kind = find_kind(family, head, config)
    fields = json.dumps(dataclasses.asdict(parsed), sort_keys=True)
    return *_split(config["model_type"], fields, head, jnp.dtype(dtype)), kind.head


@functools.lru_cache(maxsize=32)
def _split(family: str, fields: str, head: Head, dtype: Any) -> tuple[Any, nnx.State]:
    """Returns the parts of a module. To build one takes flax twenty times as long as to copy it."""
    parsed = FAMILIES[family].config(**json.loads(fields))
    build = FAMILIES[family].kinds[head.kind].build
    return nnx.split(nnx.eval_shape(lambda: build(parsed, head, dtype)))


def find_kind(family: Family, head: Head, config: Mapping[str, Any]) -> Kind:
    """Returns how a family builds a head."""
    if head.kind not in family.kinds:
        raise InputError(
            f"There is no {head.kind} head for {config['model_type']}. It has:"
            f" {', '.join(family.kinds)}."
        )
    return family.kinds[head.kind]


def parse_config(raw: Mapping[str, Any], dropout: float | None = None) -> tuple[Family, Any]:
    """Returns the family and the parsed config of a ``config.json``."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        if str(kind) in _RELATIVES:
            difference, relative = _RELATIVES[str(kind)]
            raise InputError(
                f"The model type {kind!r} is not supported: {difference}. The nearest supported"
                f" type is {relative!r}; choose a checkpoint of that type."
            )
        known = nearest(str(kind), FAMILIES, shown=len(FAMILIES))
        raise InputError(f"The model type {show(kind)} is not supported. {known}")
    family = FAMILIES[kind]
    check_stored(raw)
    raw = {family.other_names.get(name, name): value for name, value in raw.items()}
    for field, only in family.refused.items():
        if raw.get(field, only) != only:
            raise InputError(
                f"The model config has {field} = {raw[field]!r}, which is not implemented for"
                f" {kind} (only {only!r} is)."
            )
    fields = {f.name: f for f in dataclasses.fields(family.config)}
    unknown = [field for field in raw if field not in fields and field not in _METADATA]
    if family.strict and unknown:
        raise InputError(
            f"The model config has {unknown[0]} = {raw[unknown[0]]!r}, which {kind} does not know."
            f" {nearest(unknown[0], fields)}"
        )
    given = {name: value for name, value in raw.items() if name in fields}
    for name, value in given.items():
        _check_field(fields[name], value)
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise InputError(f"dropout = {dropout} is not in [0, 1).")
        rates = [field for field in fields if "dropout" in field or field.endswith("pdrop")]
        given |= dict.fromkeys(rates, dropout)
    return family, family.config(**given)


def _check_field(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raises InputError for a value of the wrong type, or a whole number out of range."""
    name = field.name
    expected: tuple[Any, ...] = typing.get_args(field.type) or (field.type,)
    if not isinstance(value, expected + ((int,) if float in expected else ())):
        raise InputError(
            f"The model config has {name} = {show(value)}; it must be of type"
            f" {' or '.join(t.__name__ for t in expected)}."
        )
    least = field.metadata.get("least", 0 if name == "pad_token_id" else 1)
    if int in expected and isinstance(value, int) and value < least:
        raise InputError(f"The model config has {name} = {value}; it must be at least {least}.")
    most = _MAX_LAYERS if "layer" in name else _MAX_NUMBER
    if type(value) is int and value > most:
        raise InputError(
            f"The model config has {name} = {show(value)}; it must be at most {most:,}."
        )


def default_targets(config: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Returns the submodules that each PEFT method adapts by default; none for a foreign model."""
    family = FAMILIES.get(config.get("model_type", ""))
    return family.targets if family else {}


def unused_bytes(config: Mapping[str, Any]) -> int:
    """Returns the bytes of a torch checkpoint that the model here does not use.

    These bytes belong to poolers in float32, and to GPT-2's causal masks (one byte per entry). The
    result is 0 for a model of another family.
    """
    if config.get("model_type") not in FAMILIES:
        return 0
    family, parsed = parse_config(config)
    return family.unused(parsed)


def class_name(model: Model) -> str:
    """Returns the name of Hugging Face's class for a model and its head.

    A family that Hugging Face does not have gets a name of the same form.
    """
    kind = model.config["model_type"]
    family = FAMILIES[kind]
    fitting = {name: k for name, k in family.kinds.items() if k.head == model.head}
    for name, k in fitting.items():
        if len(fitting) == 1:
            return family.name + k.architecture
        # Heads of one family may have one path: RoBERTa's for classes and for tags.
        made = abstract_module(model.config, Head(name, model.labels))
        if type(made).__name__ == model.graph.name:
            return family.name + k.architecture
    raise InputError(f"The head ({', '.join(model.head) or 'none'}) is not a head of {kind}.")


# ---------------------------------------------------------------------------- from module to model


def leaf_shapes(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a module's parameters by leaf name."""
    return {name: variable.shape for name, variable in leaves(module).items()}


Hold: TypeAlias = Callable[[str, Array], Any]
"""(leaf name, float32 array) -> the leaf as a model holds it."""


def holder(
    abstract: nnx.Module, head: Sequence[str], dtype: Dtype, quantize: Quantization | None
) -> Hold:
    """Returns a function that makes each new leaf as small as the model will hold it.

    It is called leaf by leaf, so that a model never lies in memory in float32 as a whole. Kernels
    are quantised; other frozen matrices are cast to the compute dtype. Everything inside the head
    stays float32.
    """
    layers = {f"{path}.kernel" for path in layers_to_quantize(abstract, quantize, head)}

    def hold(name: str, value: Array) -> Any:
        if quantize and name in layers:
            return quantize_kernel(value, quantize)
        narrow = value.ndim > 1 and not is_inside(name, head)
        return value.astype(dtype) if narrow else value

    return hold


def initialise(
    shapes: Mapping[str, tuple[int, ...]],
    std: float | None,
    seed: int,
    hold: Hold = lambda name, value: value,
) -> dict[str, Any]:
    """Returns initial values by leaf name, as Hugging Face initialises: N(0, std²), biases 0.

    Args:
      std: standard deviation; None: 1/sqrt(n) for a layer that sums n inputs (an embedding: one).
    """
    parameters = sum(math.prod(shape) for shape in shapes.values())
    held = jax.eval_shape(
        lambda: [
            nnx.state(value) if isinstance(value, nnx.Module) else value
            for value in (hold(name, jnp.zeros(shape)) for name, shape in shapes.items())
        ]
    )
    what = f"A model with {parameters:,} new parameters"
    require(tree.nbytes(held), what, "Choose a smaller one.")
    values: dict[str, Any] = {}
    for name, shape in shapes.items():
        if name.endswith((".bias", ".offset")):
            value = jnp.zeros(shape)
        elif name.endswith((".scale", ".lambda1")):
            value = jnp.ones(shape)
        else:
            inputs = 1 if name.endswith(".embedding") else math.prod(shape[:-1])
            scale = 1 / math.sqrt(inputs) if std is None else std
            value = scale * jax.random.normal(stream(seed, "init", name), shape)
        values[name] = hold(name, value)
    return values


def bind_values(values: Mapping[str, Any], abstract: nnx.Module, **info: Any) -> Model:
    """Returns an abstract module as a model with these values.

    Args:
      values: every parameter, by leaf name; the kernels of some layers may be quantised.
      abstract: from :func:`abstract_module`; it is changed.
      **info: as for :func:`fedjax_peft.bind`.
    """
    for name, parameter in leaves(abstract).items():
        value = values[name]
        if isinstance(value, QuantizedKernel):
            layer = name.removesuffix(".kernel")
            replace_module(abstract, layer, QuantizedLinear(submodule(abstract, layer), value))
        else:
            parameter.set_value(value)
    for _, state in nnx.to_flat_state(nnx.state(abstract, nnx.RngState)):
        is_key = isinstance(state, nnx.RngKey)
        state.set_value(jax.random.key(0) if is_key else jnp.zeros((), jnp.uint32))
    return bind(abstract, **info)
