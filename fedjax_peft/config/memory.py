"""The memory of a config's run, from its model's ``config.json``; weights and data are not read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from fedjax_peft.config import config as configs
from fedjax_peft.config.building import NOISE
from fedjax_peft.contracts import Algorithm, Federation, Platform
from fedjax_peft.data.catalog import DATASETS
from fedjax_peft.models import heads
from fedjax_peft.models.base import Model
from fedjax_peft.models.hub import read_config
from fedjax_peft.models.registry import parse_config
from fedjax_peft.models.reuse import STORED, Split, dtype_of
from fedjax_peft.models.reuse import split as split_model
from fedjax_peft.peft.base import abstract_model
from fedjax_peft.simulation.planning.devices import (
    DevicePlan,
    plan_on,
    planned_on,
    target_platform,
)
from fedjax_peft.simulation.planning.memory_plan import MemoryPlan, example_batch, plan_memory
from fedjax_peft.simulation.planning.step_cost import count_flops, step_flops, traced_live
from fedjax_peft.support.accelerators import Device
from fedjax_peft.support.memory import in_bytes
from fedjax_peft.tasks import Task, as_task

_LENGTH = 128
"""Tokens of an example where neither the config nor the data set says."""
_CLASSES = 2
"""Classes of a head; their number is that of the data, and it hardly matters."""


class Reused(NamedTuple):
    """What a step does not compute, and what is kept for it."""

    below: int
    """The blocks that are not applied."""
    blocks: int
    """All blocks."""
    nbytes: int
    """Bytes of one example's hidden states."""
    saved: int
    """Operations of the products below, in a step of one client."""
    left: int
    """Operations of the products of a step."""

    def __str__(self) -> str:
        return (
            f"  Reused: {self.below} of {self.blocks} blocks,"
            f" {self.saved / 1e9:,.2f} of the {(self.saved + self.left) / 1e9:,.2f} GFLOP of a"
            " step, are computed once\n  for each example. Their hidden states need"
            f" {in_bytes(1000 * self.nbytes)} for 1,000 examples of training and test data."
        )


class Planned(NamedTuple):
    """The memory of a config's run."""

    plan: MemoryPlan
    shape: str
    """The shape of a batch, in words."""
    largest: str
    """The largest array of the layer at work, in words."""
    cohort: int | None
    """The clients of a round; None: only the data know."""
    parts: tuple[Any, ...]
    """The model, the algorithm, the task and the batch, with shapes in the place of arrays."""
    local_steps: int | None
    """Of each client in a round; None: only the data know."""
    device: Device | None
    """The accelerator that it is planned for."""
    remat: bool
    """Whether the backward pass computes activations again."""
    reused: Reused | None = None
    """What is computed once for each example (``placement.reuse``); None: nothing."""

    def on_device(self, lanes: int) -> DevicePlan:
        """Returns the plan on its accelerator."""
        assert self.device is not None
        made = plan_on(self.device, self.parts, self.plan, lanes)
        if self.cohort is None or self.local_steps is None:
            return made
        return made._replace(steps=-(-self.cohort // lanes) * self.local_steps)


def planned(config: Mapping[str, Any], device: Device | None = None) -> Planned:
    """Returns the memory of a resolved config's run.

    Clients and examples that only the data know are not counted.

    Args:
      device: the accelerator that it runs on; None: the scores of attention are one array.

    Raises:
      InputError: an unsupported model, or its ``config.json`` cannot be read.
    """
    resolved = dict(config)
    task = _task(resolved)
    kind = configs.head_kind(config["model"]["head"]) or task.head
    model = shapes(resolved, kind)
    model = model if device is None else planned_on(device, model)
    size, image = config["batch_size"], _image(resolved, model.config)
    if image is None:
        length = _length(resolved, model.longest_text)
        texts = 2 if task.name == "preference" else 1
        batch = example_batch(kind, batch_size=size, length=length, texts=texts)
        words = f"{size} x {texts * length} tokens"
    else:
        batch = example_batch(kind, batch_size=size, image=image)
        words = f"{size} images of {image[1]} x {image[2]} pixels"
    algorithm = _algorithm(resolved, batch)
    reuse, split = config["placement"]["reuse"], None
    if reuse != "none":
        whole, split = model, split_model(model, {n: x for n, x in batch.items() if n != "mask"})
        shape = (size, *split.state.shape)
        batch[STORED] = jax.ShapeDtypeStruct(shape, dtype_of(split, reuse))
        model = split.above
    clients = config["partition"].get("clients") or config["clients_per_round"]
    cohort = config["clients_per_round"] or clients
    parts = (model, algorithm, task, batch)
    # Outside the device, clients' state comes to it for the clients of a round alone.
    kept = clients if config["placement"]["client_state"] == "device" else cohort
    plan = plan_memory(
        *parts,
        clients=kept or 1,
        cohort=cohort or 1,
        platform=Platform() if device is None else target_platform(device),
    )
    largest = _name(plan.activations.largest, model.config.get("vocab_size"))
    steps = config["local_steps"]
    steps = steps if isinstance(steps, int) else None
    reused = None if split is None else _reused(whole, split, parts)
    remat = config["model"]["remat"] != "none"
    return Planned(plan, words, largest, cohort, parts, steps, device, remat, reused)


def _algorithm(config: dict[str, Any], batch: Mapping[str, Any]) -> Algorithm:
    """Returns the algorithm of a config with its mechanism of privacy, as its clients run it."""
    algorithm: Algorithm = configs.build_algorithm(config)
    table = config["privacy"]
    if not table:
        return algorithm
    if "epsilon" in table:  # the noise that it stands for depends on the data; any needs the same
        table = {**table, NOISE: 1.0}
    privacy = configs.build_privacy({**config, "privacy": table})
    assert privacy is not None
    clients = config["partition"].get("clients") or config["clients_per_round"] or 2
    size = config["batch_size"]
    federation = Federation(
        clients=clients,
        per_round=config["clients_per_round"] or clients,
        sampling=config["sampling"],
        batch_size=size,
        batch_sampling=config["batch_sampling"],
        most_steps=1,
        most_passes=1,
        fewest_examples=size,
        columns=tuple((name, x.shape[1:]) for name, x in batch.items() if name != "mask"),
        workloads=((size, 1),),
        gradients_per_step=algorithm.gradients_per_step,
    )
    return privacy.protect(algorithm, federation)


def _reused(whole: Model, split: Split, parts: tuple[Any, ...]) -> Reused:
    """Returns what the two parts of a model need."""
    model, _, task, batch = parts
    leaves = {**whole.frozen, **whole.trainable}
    below = {name: x for name, x in batch.items() if name not in (STORED, "mask")}
    saved = count_flops(traced_live(split.states, leaves, below))
    left = step_flops(model, task, batch)
    stored = batch[STORED]
    nbytes = stored.size * stored.dtype.itemsize // stored.shape[0]
    return Reused(split.below, split.blocks, nbytes, saved, left)


def shapes(config: Mapping[str, Any], kind: str) -> Model:
    """Returns the model of a resolved config with shapes instead of arrays."""
    options = config["model"]
    labels = () if kind in heads.WITHOUT_CLASSES else _CLASSES
    known = ("dtype", "dropout", "quantize", "remat", "scan_layers", "attention")
    return abstract_model(
        options["config"] or read_config(options["name"], source=options["source"]),
        configs.build_method(dict(config)),
        head=heads.make(kind, labels),
        **{name: options[name] for name in known if name in options},
    )


def _task(config: dict[str, Any]) -> Task:
    """Returns the task of a config, or else that of its data set."""
    entry = DATASETS.get(config["data"]["name"])
    named = config["task"] or config["model"]["head"] or entry is None
    return configs.task_of(config) if named or entry is None else as_task(entry.task)


def _length(config: Mapping[str, Any], longest: int) -> int:
    """Returns the number of tokens of a row; the model reads at most ``longest``."""
    data = config["data"]
    entry = DATASETS.get(data["name"])
    usual = _LENGTH if entry is None else entry.settings.max_length
    return min(data["packing"] or data["max_length"] or usual, longest)


def _image(config: Mapping[str, Any], shape: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Returns channels, height and width of the stored images; None if the model reads texts.

    Where the data set's images are not known, they have the size that the model takes.
    """
    _, parsed = parse_config(shape)
    if not hasattr(parsed, "image_size"):
        return None
    entry = DATASETS.get(config["data"]["name"])
    if entry is not None and entry.shape:
        height, width, *channels = entry.shape
        return channels[0] if channels else 1, height, width
    sides = parsed.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    return parsed.num_channels, height, width


def _name(shape: tuple[int, ...], vocabulary: int | None) -> str:
    """Returns the shape of an array, with its name if it has a usual one."""
    text = " x ".join(map(str, shape))
    if shape and shape[-1] == vocabulary:
        return f"logits {text}"
    if len(shape) == 4 and shape[-2] == shape[-1]:
        return f"attention's scores {text}"
    return text
