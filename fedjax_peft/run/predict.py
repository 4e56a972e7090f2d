"""What a finished run predicts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_peft.data.text import tokenize
from fedjax_peft.errors import InputError
from fedjax_peft.models.base import Model
from fedjax_peft.run import config as configs
from fedjax_peft.run import record
from fedjax_peft.typing import Params

__all__ = ["load_trained", "predict", "read_inputs"]


def load_trained(directory: str | Path) -> tuple[Model, Params, dict[str, Any]]:
    """Returns the model of a run directory, its trained global leaves, and the run's config.

    Raises:
      InputError: no run, one without a checkpoint yet, or one made in Python (its config does not
        say how to make the model again; use ``Run.export`` and ``Run.predict`` there).
    """
    directory = Path(directory)
    config = record.read_config(directory)
    if "model" not in config:
        raise InputError(
            f"{directory} was made by fp.simulate in Python, so its config does not say how to"
            " make the model again: use run.export() and run.predict() there."
        )
    params, labels = record.read_params(directory)
    model = configs.build_model(configs.resolve(config), labels)
    shapes = {name: value.shape for name, value in model.trainable.items()}
    if shapes != {name: value.shape for name, value in params.items()}:
        raise InputError(f"The trained leaves in {directory} do not fit the model of its config.")
    return model, params, config


def predict(
    model: Model,
    params: Params,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int = 128,
    batch_size: int = 64,
) -> np.ndarray:
    """Returns float32 logits ``[texts, classes]``, in order.

    Raises:
      InputError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise InputError("This model has no tokenizer, so it cannot read text.")
    if not len(texts):
        return np.zeros((0, len(model.labels)), np.float32)
    columns = tokenize(model.tokenizer, texts, pairs, max_length=max_length)
    forward = jax.jit(lambda f, p, batch: model.apply(f, p, batch, None, False).logits)
    frozen = model.compute_frozen()
    rows = []
    for start in range(0, len(texts), batch_size):
        batch = {name: column[start : start + batch_size] for name, column in columns.items()}
        missing = batch_size - len(batch["input_ids"])
        padded = {n: np.pad(c, ((0, missing), (0, 0)), mode="edge") for n, c in batch.items()}
        rows.append(np.asarray(forward(frozen, params, padded))[: batch_size - missing])
    return np.concatenate(rows)


def read_inputs(path: str | Path) -> tuple[list[str], list[str] | None]:
    """Returns the texts (and second texts) of a JSON-lines file.

    Raises:
      InputError: a line that is not an object with a string ``text`` (all or none with
        ``text_pair``); the line is named.
    """
    texts: list[str] = []
    pairs: list[str] = []
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The input {str(path)!r} cannot be read: {error}.") from None
    # split, not splitlines: JSON strings may hold other line separators raw.
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except ValueError as error:
            raise InputError(f"{where} is not JSON: {error}.") from None
        if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
            raise InputError(f'{where} is not an object with a string "text".')
        if not isinstance(item.get("text_pair", ""), str):
            raise InputError(f'{where}: "text_pair" must be a string.')
        texts.append(item["text"])
        if "text_pair" in item:
            pairs.append(item["text_pair"])
        if pairs and len(pairs) != len(texts):
            raise InputError(f'{where}: either all lines have a "text_pair" or none.')
    return texts, pairs or None
