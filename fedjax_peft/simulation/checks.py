"""Checks of the arguments of ``simulate``, before anything is allocated or written."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_peft import algorithms, tasks
from fedjax_peft.contracts import (
    Aggregator,
    Algorithm,
    Feature,
    Outputs,
    Params,
    Roles,
    ServerUpdate,
    Task,
    Transform,
    Weights,
    check_compatible,
)
from fedjax_peft.contracts.dual_modes import mode
from fedjax_peft.data.dataset import Clients, Dataset
from fedjax_peft.engine.schedule import Range, Sampling, Schedule
from fedjax_peft.models.base import Model
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import InputError, check_known, nearest, users_level
from fedjax_peft.support.memory import require
from fedjax_peft.support.nested import Watched
from fedjax_peft.transforms import chain
from fedjax_peft.transforms.compressing import feeds_back

_ZERO = "a whole number from 0 up"
_MOST = {"rounds": 1_000_000, "seed": 2**63 - 1}
"""Largest values of settings whose limit is not that of int32. ``rounds`` has a lower limit because
the cohorts of all rounds are drawn before the first round starts."""


def check_objects(model: Any, algorithm: Any, clients: Any, task: Any) -> None:
    """Raises InputError for an argument of ``session`` that has the wrong type."""
    if not isinstance(model, Model):
        advice = 'Bind an NNX module of your own: fp.bind(module, head=("classifier",)).'
        if isinstance(model, str):
            advice = f"Load it: fp.load_model({model!r}, head=...)."
        if isinstance(model, Algorithm):
            advice = "Give the model first, and then the algorithm."
        raise _other_kind("model", model, "fp.Model", advice)
    if model.kinds.keys() != model.trainable.keys():
        names = sorted(model.kinds.keys() ^ model.trainable.keys())
        raise InputError(
            "Model.kinds must name the kind of each leaf of Model.trainable, which is a flat dict:"
            f" {names[0]!r} is in one of them only."
        )
    if not isinstance(algorithm, Algorithm):
        if isinstance(algorithm, str) and algorithm in algorithms.__all__:
            advice = f"Make it: fp.algorithms.{algorithm}(optax.adamw(1e-3))."
        elif isinstance(algorithm, str):
            advice = nearest(algorithm, algorithms.__all__)
        elif callable(algorithm):
            advice = f"Call it: {getattr(algorithm, '__name__', 'it')}(optax.adamw(1e-3))."
        else:
            advice = "Make one, such as fp.algorithms.fedavg(optax.adamw(1e-3))."
        raise _other_kind("algorithm", algorithm, "fp.contracts.Algorithm", advice)
    _check_fields(algorithm)
    check_clients("clients", clients)
    if task is not None and not isinstance(task, Task):
        raise _other_kind("task", task, "fp.tasks.Task", "fp.tasks has functions that return one.")


def _check_fields(algorithm: Algorithm) -> None:
    """Raises InputError for a field of an algorithm of the wrong type."""
    types: dict[str, Any] = {"roles": Roles, "aggregator": Aggregator, "server": ServerUpdate}
    types["client"] = Callable
    for field, kind in types.items():
        if not isinstance(value := getattr(algorithm, field), kind):
            wanted = "function" if field == "client" else f"fp.contracts.{kind.__name__}"
            given = f"{field!r} of {algorithm.name!r} is of the type {type(value).__name__}"
            raise InputError(f"The field {given}, and must be a {wanted}.")
    for role, rules in algorithm.roles._asdict().items():
        if isinstance(rules, str):
            raise InputError(f"Roles.{role} must be a tuple of rules: ({rules!r},).")
    check_known("weighting", algorithm.weights, get_args(Weights))


def check_test_objects(data: Mapping[str, Any]) -> None:
    """Raises InputError for ``test`` or ``validation`` that is no data set."""
    for name, value in data.items():
        if value is not None and not isinstance(value, Dataset):
            advice = f"Of a dict of splits give one: {name}=data[{name!r}]."
            raise _other_kind(name, value, "fp.Dataset", advice)


def check_stop(stop: Any) -> None:
    """Raises InputError for a stop rule that is no function."""
    if stop is not None and not callable(stop):
        advice = "Make one: fp.early_stop(target=0.8, patience=5)."
        raise _other_kind("stop", stop, "function of the rows", advice)


def check_clients(name: str, value: Any) -> None:
    """Raises InputError for an argument that is not the examples of clients."""
    if not isinstance(value, Clients):
        advice = "Share a data set out: fp.partition.iid(data, clients=10)."
        raise _other_kind(name, value, "fp.Clients", advice)


def check_list(name: str, value: Any) -> None:
    """Raises InputError for an option that must be a list, such as one function of several."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise _other_kind(name, value, "list", f"Give a list: {name}=[...].")


def check_functions(name: str, value: Any) -> None:
    """Raises InputError for what is not a list of functions of a moment."""
    check_list(name, value)
    for one in value:
        if not callable(one):
            kind = name.removesuffix("s")
            raise InputError(f"A {kind} is a function of a moment, not {show(one)}.")


def _other_kind(argument: str, value: Any, wanted: str, advice: str) -> InputError:
    # The repr is not shown, because that of a data set or a module may be long.
    given = show(value) if isinstance(value, str) else f"of the type {type(value).__name__}"
    return InputError(f"The argument {argument!r} is {given}, and must be a {wanted}. {advice}")


def check_counts(positive: Mapping[str, int], from_zero: Mapping[str, int]) -> None:
    """Raises InputError for a number that is not an integer, is too small or is too large."""
    for least, what, values in ((1, "a positive whole number", positive), (0, _ZERO, from_zero)):
        for name, value in values.items():
            if not isinstance(value, int) or value < least:
                raise InputError(f"{name} = {show(value)} must be {what}.")
            if value > (most := _MOST.get(name, 2**31 - 1)):
                raise InputError(f"{name} = {show(value)} is too large: at most {most:,}.")


def check_work(
    epochs: Range, local_steps: Range | None, stragglers: float
) -> tuple[Range, Range | None]:
    """Returns ``epochs`` and ``local_steps``, with pairs as tuples.

    Raises:
      InputError: a number or a pair that is invalid, or a share of stragglers without a range to
        draw from.
    """
    epochs = _checked_range("epochs", epochs)
    if local_steps is not None:
        local_steps = _checked_range("local_steps", local_steps)
    name, work = ("epochs", epochs) if local_steps is None else ("local_steps", local_steps)
    if stragglers != 1 and isinstance(work, int):
        raise InputError(
            f"stragglers = {stragglers} needs a range to draw their work from: give {name} as a"
            f" pair, such as {name} = [1, {max(work, 2)}], and not as {work}."
        )
    return epochs, local_steps


def _checked_range(name: str, value: Range) -> Range:
    """Returns a number, or a pair as a tuple; raises InputError for any other value."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        check_counts({name: value}, {})
        return value
    if len(value) != 2:
        raise InputError(
            f"{name} = {show(value)} must be a positive whole number, or a pair of them: the least"
            f" and the most, such as {name} = [2, 8]."
        )
    check_counts({f"{name}[{i}]": number for i, number in enumerate(value)}, {})
    least, most = value
    if least > most:
        raise InputError(
            f"{name} = {show(value)} is a range whose least number is larger than its most. Write"
            f" {name} = [{most}, {least}]."
        )
    return least, most


def check_memory(schedule: Schedule) -> None:
    """Raises InputError for local work whose plan of a round needs more memory than available."""
    most, batch_size = np.asarray(schedule.all_most_steps, np.int64), schedule.room
    total = sum(np.sort(most)[-schedule.per_round :].tolist())  # without overflow
    epochs, local_steps = schedule.epochs, schedule.local_steps
    work = f"epochs = {epochs}" if local_steps is None else f"local_steps = {local_steps}"
    require(
        5 * total * batch_size,  # an index and a mask for each example
        f"The plan of a round with {work} and batch_size = {batch_size} ({total:,} local steps)",
        "Choose fewer local steps or a smaller batch.",
    )


def check_method(
    model: Model,
    algorithm: Algorithm,
    clients: int,
    client_ranks: Sequence[int] | None,
    diagnostics: Sequence[str],
) -> None:
    """Raises InputError if model and algorithm do not fit; warns if they are a poor match."""
    advice = (
        "Attach a PEFT method: model = fp.attach(model, fp.lora(rank=8)). To train the head alone,"
        " or everything, say so with fp.peft.head_only() or fp.peft.full()."
    )
    if not model.trainable:
        raise InputError(f"The model has no parameters to train. {advice}")
    aggregator, features = algorithm.aggregator, {}
    if aggregator.refactors:
        features[Feature.NEW_FACTORS] = (
            f"the aggregator {aggregator.name!r}, which factors LoRA's products anew: A and B have"
            " another basis in every round, and their entries cannot be compared over rounds"
        )
    if client_ranks is not None:
        features[Feature.CLIENT_RANKS] = "client_ranks"
    check_compatible(algorithm, features)
    algorithm.check(model.kinds, clients)
    if {"cka", "second_classifier"} & set(diagnostics):
        mode(model.trainable, "global")  # its error says what is missing
    if "second_classifier" in diagnostics and not any(
        "second_classifier." in name for name in model.kinds
    ):
        raise InputError(
            'diagnostics=["second_classifier"] needs a model with a second classifier: load it'
            " with head=heads.two_classifiers(...)."
        )
    # A model from scratch has no frozen weights: all of it is trained, so no warning is needed.
    if model.frozen and "adapter" not in model.kinds.values() and model.method is None:
        warnings.warn(
            "The model has 0 adapter parameters: only its head, of"
            f" {model.counts()['head']:,} parameters, is trained. {advice}",
            stacklevel=users_level(),
        )
    if model.method is not None and (missing := model.method.start_missing(model.trainable)):
        warnings.warn(missing, stacklevel=users_level())
    if aggregator.truncates and model.method is not None and model.method.start_shapes_frozen:
        warnings.warn(
            f"The aggregator {aggregator.name!r} truncates the whole product of the factors. After"
            " an SVD start, or another start from the weights, most of that product is a part of"
            " the pretrained weight, so small updates outside of its directions are lost. Watch"
            " aggregation_error, or aggregate by the mean.",
            stacklevel=users_level(),
        )


def check_trusted(algorithm: Algorithm, weights: np.ndarray) -> None:
    """Raises InputError for an aggregator that trusts a client whose upload never counts.

    Args:
      weights: of all clients; 0 without examples.
    """
    trusted = algorithm.aggregator.trusted
    if trusted is None or (trusted < len(weights) and weights[trusted]):
        return
    why = "has no examples or the weight 0" if trusted < len(weights) else "does not exist"
    raise InputError(
        f"The aggregator {algorithm.aggregator.name!r} trusts client {trusted}, which {why}, so the"
        " model would never change. Trust one with examples and a weight, such as"
        f" {int(np.argmax(weights))}."
    )


def check_transforms(
    transforms: Transform | Sequence[Transform] | None, algorithm: Algorithm
) -> Transform | None:
    """Returns the upload transforms as a single transform, None if there are none.

    Raises:
      InputError: an entry is not a transform, or does not fit the algorithm.
    """
    transform = joined_transform(transforms)
    if transform is None:
        return None
    what = f"the upload transform {transform.name!r}"
    features = {Feature.TRANSFORMS: what}
    if transform.changes_aggregate:
        features[Feature.SERVER_TRANSFORMS] = (
            f"{what}, which changes the mean of the uploads on the server"
        )
    if transform.receive is not None:
        features[Feature.DOWNLINK] = f"{what}, which compresses what the server broadcasts"
    check_compatible(algorithm, features)
    return transform


def warn_of_feedback(transform: Transform | None, algorithm: Algorithm, shared: Params) -> None:
    """Warns of error feedback over an aggregator that factors LoRA's products anew."""
    if transform is None or not algorithm.aggregator.refactors:
        return

    def memory(shared: Params) -> Any:
        template = algorithm.server.unchanged(algorithm.server.init(shared))
        return transform.memory(algorithm.change_part(template))

    if feeds_back(jax.eval_shape(memory, shared)):
        warnings.warn(
            f"The aggregator {algorithm.aggregator.name!r} factors LoRA's products anew: A and B"
            " have another basis in every round, in which the losses that error feedback adds to"
            " the next change mean something else. Give error_feedback=False to"
            f" {transform.name!r}, or average A and B.",
            stacklevel=users_level(),
        )


def joined_transform(transforms: Transform | Sequence[Transform] | None) -> Transform | None:
    """Returns upload transforms as a single transform, None if there are none.

    Raises:
      InputError: an entry is not a transform.
    """
    if transforms is None or (isinstance(transforms, Sequence) and not len(transforms)):
        return None
    one = isinstance(transforms, Transform) or not isinstance(transforms, list | tuple)
    return chain(*([transforms] if one else transforms))


def clients_a_round(clients: Clients, given: int | None, sampling: Sampling) -> int:
    """Returns the number of clients in a round; by default all clients."""
    check_known("sampling", sampling, get_args(Sampling))
    if given is None:
        if sampling in ("size", "poisson", "round_robin"):
            raise InputError(f"sampling = {sampling!r} needs clients_per_round.")
        return len(clients)
    if given > len(clients):
        raise InputError(
            f"clients_per_round = {given} is more than the {len(clients)} clients there are."
        )
    if sampling == "all" and given != len(clients):
        raise InputError(
            f"sampling = 'all' takes all {len(clients)} clients into every round, but"
            f" clients_per_round = {given}: leave it out, or choose another sampling."
        )
    number = int(_counts(clients).sum())
    if sampling == "size" and given > number:
        raise InputError(
            f"sampling = 'size' draws clients that have examples and a weight, which are {number}:"
            f" clients_per_round = {given} is more."
        )
    return given


def _counts(clients: Clients) -> np.ndarray:
    """Returns the clients that have examples and a weight, bool ``[clients]``."""
    some = clients.sizes > 0
    return some if clients.weights is None else some & (clients.weights > 0)


def check_data(model: Model, clients: Clients, task: Task | None) -> None:
    """Raises InputError for training data that are empty, or do not fit the head or the task.

    Without ``task``, the task of the data is used. The task's own ``check`` is run too.
    """
    if not clients.sizes.any():
        raise InputError("No client has an example to train on.")
    if not _counts(clients).any():
        raise InputError(
            "All clients that have examples have the weight 0, so no update would ever count. Give"
            " some of them a positive number in Clients.weights."
        )
    _check_fit(model, "training", clients.data, task)


def check_test_data(
    model: Model,
    clients: Clients,
    tested: Mapping[str, Dataset | Clients],
    task: Task | None,
) -> None:
    """Raises InputError for evaluation data that are empty or do not fit clients, head or task.

    Args:
      tested: name -> a data set, or the examples of each client.
    """
    for name, one in tested.items():
        if isinstance(one, Clients):
            if len(one) != len(clients):
                raise InputError(f"{name} is of {len(one)} clients, but there are {len(clients)}.")
            if not one.sizes.any():
                raise InputError(f"{name} gives no client an example to be tested on.")
        elif not len(one):
            raise InputError(f"The {name} data have no examples.")
    for name, one in tested.items():
        _check_fit(model, name, one.data if isinstance(one, Clients) else one, task)


def _check_packed(model: Model, data: Dataset) -> None:
    """Raises InputError for packed rows and a model that does not keep their examples apart."""
    read: set[str] = set()

    def forward(batch: Mapping[str, Any]) -> Any:
        watched = Watched(batch)
        logits = model.apply(model.frozen, model.trainable, watched, None, False).logits
        read.update(watched.read)
        return logits

    row = {n: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for n, x in data.columns.items()}
    jax.eval_shape(forward, row)
    missing = {"segment_ids", "position_ids"} - read
    if missing:
        raise InputError(
            f"The rows of {data.name!r} hold several texts, and this model does not read the column"
            f" {min(missing)!r}, by which it would keep them apart. Leave packing out for it;"
            " preferences need another model."
        )


def _check_fit(model: Model, name: str, data: Dataset, task: Task | None) -> None:
    checked = tasks.for_data(data) if task is None else task
    if isinstance(checked, tasks.Task):  # a user's task may have no `check`
        checked.check(data, name)
    size = model.config.get("vocab_size")
    if "input_ids" in data.columns and isinstance(size, int):
        token = int(data.columns["input_ids"].max(initial=0))
        if token >= size:
            raise InputError(
                f"The {name} data have the token {token}, but the model's vocabulary has {size}"
                f" tokens (0 to {size - 1}): they were made by another model's tokenizer."
            )
    if "segment_ids" in data.columns:
        _check_packed(model, data)
    if reserved := sorted({"mask", "step", "steps"} & data.columns.keys()):
        raise InputError(
            f"The {name} data have a column {reserved[0]!r}, which a batch has of its own: give the"
            " column another name."
        )
    if "labels" not in data.columns:
        return
    classes, highest = len(model.labels), int(data.labels.max(initial=0))
    if not classes and getattr(checked, "loss", None) is tasks.classification().loss:
        classes = _logits(model, data)  # a label of this loss is the number of a logit
    if classes and highest >= classes:
        raise InputError(
            f"The {name} data have the label {highest}, but the model's head has"
            f" {classes} classes (0 to {classes - 1})."
        )


def _logits(model: Model, data: Dataset) -> int:
    """Returns the number of logits of a model without class names."""
    batch: Any = {name: jnp.asarray(x[:1]) for name, x in data.columns.items()}
    batch |= {"mask": np.ones(1, bool), "step": np.int32(0), "steps": np.int32(1)}

    def forward(frozen: Params, trainable: Params) -> Any:
        return model.apply(frozen, trainable, batch, None, False)

    outputs = jax.eval_shape(forward, model.frozen, model.trainable)  # a plan's model is shapes
    # Something else than outputs is an error of the round.
    return outputs.logits.shape[-1] if isinstance(outputs, Outputs) else 0
