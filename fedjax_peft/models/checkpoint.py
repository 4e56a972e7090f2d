"""Hugging Face checkpoints on disk: ``config.json`` and safetensors. Pickle is never read.

Reading is checked both ways: every tensor of the checkpoint is used or ignored by name, every leaf
of the model is filled, and all mismatches are reported together.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from safetensors import SafetensorError, safe_open

from fedjax_peft.models import heads
from fedjax_peft.models.family import Family, Kind
from fedjax_peft.models.heads import Head, LanguageModel
from fedjax_peft.models.images import processor
from fedjax_peft.models.modules import is_inside
from fedjax_peft.models.names import (
    first_of,
    leaf_of,
    source_name,
    substituted,
    usual_start,
)
from fedjax_peft.models.registry import FAMILIES
from fedjax_peft.numerics.linalg import is_finite
from fedjax_peft.support.errors import InputError, nearest
from fedjax_peft.support.files import read_text

_OTHER_HEADS = (
    r"(classifier|pre_classifier|second_classifier|qa_outputs|score|lm_head|cls|pooler|projector"
    r"|lm_predictions|mask_predictions|vocab_\w+|\w+\.pooler)\..+"
)
"""Heads that a checkpoint may hold in addition to the requested head, or instead of it."""

_AXES = {2: (1, 0), 4: (2, 3, 1, 0)}
"""Axis orders from torch's linear and convolution weights to flax's kernels, by rank."""
_TORCH_AXES = {2: (1, 0), 4: (3, 2, 0, 1)}


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file."""
    try:
        value = json.loads(read_text(path))
    except OSError:
        raise InputError(f"{path.parent} holds no {path.name}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object.")
    return value


# ------------------------------------------------------------------------------------------ tensors


class Tensors(Protocol):
    """The tensors of a checkpoint in any format."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by Hugging Face's names of tensors."""

    def read(self, name: str, transposed: bool) -> Array:
        """Returns a tensor in float32, with flax's order of axes if ``transposed``."""


class _Stored(NamedTuple):
    """The location of a tensor."""

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
"""Dtypes by their names in safetensors."""
_ALIGNMENT = 64
"""Alignment in bytes. XLA uses memory with this alignment without a copy."""


class Safetensors:
    """The tensors of safetensors files, such as :func:`weight_files`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._stored: dict[str, _Stored] = {}
        for file in files:
            try:
                with safe_open(file, framework="np"):  # checks the header against the file's size
                    self._stored |= _contents(file)
            except FileNotFoundError:
                raise InputError(f"The shard {file} is missing.") from None
            except (SafetensorError, OSError) as error:
                raise broken(file, error) from None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by tensor name."""
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str, transposed: bool) -> Array:
        """Returns a tensor in float32, with flax's order of axes if ``transposed``."""
        return leaf_value(self.file(name), name, self.raw(name), transposed)

    def file(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._stored[name].file

    def raw(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored.

        It is read into new memory. A memory-mapped file would count as memory of this
        process until it is closed, and its tensors would have to be copied. On a CPU, JAX uses
        aligned memory without a copy.
        """
        file, shape, kind, offset = self._stored[name]
        if kind not in _STORED:
            raise InputError(
                f"{file} holds {name} as {kind}, which is not read. {nearest(kind, _STORED)}"
            )
        size = math.prod(shape) * _STORED[kind].itemsize
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + size]
        with file.open("rb") as f:
            f.seek(offset)
            if f.readinto(memory.data) != size:
                raise broken(file, f"{name} ends early")
        return memory.view(_STORED[kind]).reshape(shape)


def leaf_value(file: Path, name: str, array: np.ndarray, transposed: bool) -> Array:
    """Returns a tensor of a file in float32, with flax's order of axes if ``transposed``."""
    if not is_finite(array):
        raise InputError(
            f"{file} holds values that are not finite (NaN or infinity) in the tensor {name!r}:"
            " its weights are damaged, or their training diverged."
        )
    if array.dtype == np.float16:  # XLA cannot convert it on a processor without F16C
        array = array.astype(np.float32)
    value = jax.device_put(array, may_alias=True).astype(jnp.float32)
    return jnp.transpose(value, _AXES[value.ndim]) if transposed else value


def weight_files(directory: Path) -> list[Path]:
    """Returns the files of a checkpoint directory: one, or the shards of an index."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index} has no weight_map.")
        # Only the last part of each name is used, so a hostile index cannot leave the directory.
        shards = {Path(str(name)).name for name in weight_map.values()}
        return [directory / name for name in sorted(shards)]
    if pickles := sorted(p.name for p in directory.glob("*.bin")):
        raise only_pickle(directory, pickles[0], "save_pretrained in transformers does")
    raise InputError(f"{directory} holds no model.safetensors.")


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


def only_pickle(directory: Path, name: str, convert: str) -> InputError:
    """Returns the error for weights that are there only as pickle."""
    return InputError(
        f"{directory} holds its weights only as pickle ({name}), which can run any code when it is"
        f" read and is refused. Convert it to safetensors first ({convert})."
    )


def broken(file: Path, reason: object, what: str = "safetensors file") -> InputError:
    """Returns the error for a file of weights that cannot be read."""
    return InputError(
        f"{file} is not a whole {what} ({reason}). It may be truncated: fetch it again."
    )


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[i] for i in _TORCH_AXES[len(shape)])


# -------------------------------------------------------------------------------- reading a model


def held_head(
    name: str, config: Mapping[str, Any], family: Family, names: Mapping[str, str]
) -> Head:
    """Returns the head that a checkpoint holds.

    Args:
      config: the fields of its ``config.json``.
      names: the checkpoint's tensors, from :func:`fedjax_peft.models.names.normal_names`.
    """
    declared = [str(a) for a in config.get("architectures") or ()]
    for kind, k in family.kinds.items():
        possible = any(a.endswith(k.architecture) for a in declared) or not declared
        if not possible or (k.head and not any(is_inside(n, k.head[-1:]) for n in names)):
            continue
        problem = config.get("problem_type") or "single_label_classification"
        if kind == "classification" and problem != "single_label_classification":
            raise InputError(
                f"The head of the checkpoint {name!r} is one for {problem} (problem_type), and here"
                " a text has exactly one class. Say which classes: head=classification(names)"
                " starts from the weights of that head, fresh=True from new ones."
            )
        return heads.make(kind, () if kind in heads.WITHOUT_CLASSES else _config_labels(config))
    raise InputError(
        f"The checkpoint {name!r} holds no head: say which one to put on it, such as"
        " head=classification(20). Embeddings do not read it."
    )


def _config_labels(config: Mapping[str, Any]) -> list[str] | int:
    if names := class_names(config):
        return names
    try:
        return int(config.get("num_labels", 2))  # transformers does not write 2, its default
    except (TypeError, ValueError):
        raise InputError("The num_labels of the model config must be a number.") from None


def class_names(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names in ``id2label``, in the order of their numbers; none without the table."""
    names = fields.get("id2label")
    try:
        if isinstance(names, dict):
            return [str(names[k]) for k in sorted(names, key=int)]
    except (TypeError, ValueError):
        raise InputError("The id2label of a config must map class numbers to names.") from None
    return []


def match(
    name: str,
    family: Family,
    kind: Kind,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    tensors: Tensors,
    head: Head,
) -> dict[str, tuple[str, bool]]:
    """Returns which tensor fills each leaf: leaf -> (tensor name, stored transposed).

    Leaves of a head that the checkpoint does not hold are left out.

    Args:
      names: the checkpoint's tensors, from :func:`fedjax_peft.models.names.normal_names`.
    """
    plan: dict[str, tuple[str, bool]] = {}
    problems = []
    stored_shapes = tensors.shapes
    for usual, key in names.items():
        normal = substituted(usual, kind.renamed)
        is_head = is_inside(normal, kind.head[-1:])
        if head.fresh and is_head:
            continue
        leaf, transposed = leaf_of(normal, family)
        unused = any(re.fullmatch(p, normal) for p in (_OTHER_HEADS, *family.ignored))
        if leaf not in shapes and unused and ".lora_" not in normal:
            continue
        stored = stored_shapes[key]
        wanted = shapes.get(leaf)
        if wanted is not None and transposed:
            wanted = _torch_shape(wanted)
        if wanted is None:
            problems.append(f"{key} {list(stored)} has no place in the model")
        elif wanted != stored:
            hint = " (fresh=True starts a new head)" if is_head else ""
            problems.append(f"{key} is {list(stored)}, the model needs {list(wanted)}{hint}")
        else:
            plan[leaf] = (key, transposed)
            continue
        plan.setdefault(leaf, (key, transposed))
    # A head module may be missing as a whole, but not in part.
    absent = tuple(module for module in kind.head if not any(is_inside(n, (module,)) for n in plan))
    problems += [
        f"{source_name(leaf, family)[0]} {list(shapes[leaf])} is missing"
        for leaf in shapes
        if leaf not in plan and not is_inside(leaf, absent)
    ]
    if problems:
        raise InputError(
            f"The weights of {name!r} do not fit its config ({len(problems)} mismatches):"
            f" {first_of(problems)}.{_cause(plan, shapes, names, family)}"
        )
    return plan


def _cause(
    plan: Mapping[str, Any],
    shapes: Mapping[str, Any],
    names: Mapping[str, str],
    family: Family,
) -> str:
    """Returns a sentence with the reason why many tensors do not fit, if it is known."""
    if any(".lora_" in name for name in names):
        return (
            " It holds the weights of a LoRA beside those of its base: save the merged model"
            " (merge_and_unload in peft)."
        )
    if plan.keys() & shapes.keys():
        return ""
    ours = usual_start(source_name(leaf, family)[0] for leaf in shapes)
    return (
        f" Most of its names begin with {usual_start(names.values())!r}, the model's with {ours!r}."
    )


def check_tied(
    name: str,
    abstract: nnx.Module,
    names: Mapping[str, str],
    values: Mapping[str, Any],
    read: Callable[[str, str], Any],
) -> None:
    """Raises InputError if a checkpoint holds another output layer than a tied head has.

    transformers uses such a layer, whatever the config says. An equal copy is no second layer.

    Args:
      abstract: the module; only a language model has a tied head.
      names: the checkpoint's tensors, from :func:`fedjax_peft.models.names.normal_names`.
      values: the leaves of the model.
      read: (leaf, tensor name) -> the tensor as that leaf would hold it.
    """
    key = names.get("lm_head.weight")
    if key is None or not isinstance(abstract, LanguageModel) or abstract.tied is None:
        return
    table = f"{abstract.tied}.embedding"
    if not jnp.array_equal(read(table, key), values[table]):
        raise InputError(
            f"The config of {name!r} has tie_word_embeddings = true, so that the head is the table"
            f" of token embeddings, and its weights hold a {key} that differs from the table. Set"
            " tie_word_embeddings = false in config.json to use that layer, or delete it."
        )


# -------------------------------------------------------------------------------- writing a model


def save_checkpoint(
    values: Mapping[str, Any],
    config: Mapping[str, Any],
    directory: Path,
    labels: tuple[str, ...],
    *,
    architecture: str | None = None,
    dtype: str = "float32",
) -> None:
    """Writes leaves as a Hugging Face checkpoint, the inverse of loading.

    Args:
      values: all leaves of a model without a PEFT method.
      config: the ``config.json`` to start from.
      directory: the directory for ``config.json`` and ``model.safetensors``, and of a model of
        images for ``preprocessor_config.json``.
      labels: names of the classes; none for a model whose head has no classes.
      architecture: Hugging Face's class, such as ``BertForSequenceClassification``.
      dtype: of the file: ``float32``, or ``bfloat16``, to which values are rounded.
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
        array = np.ascontiguousarray(array).astype(jnp.dtype(dtype), copy=False)
        tensors[substituted(name, family.saved)] = array
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # transformers casts the weights that it reads to the dtype in the config. The other fields
    # describe the head that the original checkpoint had, and the bits of its weights.
    old = ("torch_dtype", "num_labels", "problem_type", "quantization_config")
    fields = {k: v for k, v in config.items() if k not in old} | {"dtype": dtype}
    if labels:
        names = dict(enumerate(labels))
        fields |= {"id2label": names, "label2id": {v: k for k, v in names.items()}}
    if architecture:
        fields["architectures"] = [architecture]
    files = {"config.json": fields}
    if config["model_type"] in ("vit", "dinov2"):
        files["preprocessor_config.json"] = processor(config)
    for name, content in files.items():
        text = json.dumps(content, indent=2, sort_keys=True)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    # safetensors makes a file that only its owner can read.
    (directory / "model.safetensors").chmod((directory / "config.json").stat().st_mode)
