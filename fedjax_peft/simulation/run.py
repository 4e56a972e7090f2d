"""``Run``: the result of a simulation."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedjax_peft.contracts import Algorithm, Params, PyTree, Task
from fedjax_peft.data.dataset import Dataset
from fedjax_peft.engine.stores.client_store import client_count, client_rows
from fedjax_peft.models.base import Model
from fedjax_peft.numerics import tree
from fedjax_peft.peft.ranks import of_client
from fedjax_peft.simulation.client_models import (
    check_clients,
    check_format,
    check_global,
    check_here,
    choose_client,
    client_number,
    untrained_note,
)
from fedjax_peft.simulation.rows import (
    Row,
    by_class_of,
    client_names,
    headline,
    last_with,
    seen_clients,
)
from fedjax_peft.simulation.score_names import Score
from fedjax_peft.simulation.summaries import personal_privacy_note, privacy_in_words
from fedjax_peft.support.display import counted
from fedjax_peft.support.errors import InputError, users_level
from fedjax_peft.support.rooms import above
from fedjax_peft.tasks import classification
from fedjax_peft.tasks.base import Task as BuiltTask
from fedjax_peft.tasks.by_class import ByClass

if TYPE_CHECKING:
    from fedjax_peft.tasks.inference import Output


def _not_kept() -> None:
    """Returns None: the run did not keep digests of its training examples."""


@dataclass(frozen=True, repr=False)
class Run:
    """The result of :func:`simulate`: trained leaves, and one row of metrics for each round."""

    model: Model
    algorithm: Algorithm
    params: Params
    """All trainable leaves of the global model (private ones at their initial values)."""
    client_state: PyTree
    """The state that clients keep, such as their private leaves: arrays ``[clients, ...]``, or with
    ``client_state="host"`` or ``"disk"`` an object whose ``take(clients).client_state`` returns
    them."""
    server: PyTree
    """The server's state."""
    metrics: list[Row]
    out: Path | None = None
    client_ranks: Sequence[int] | None = None
    """As given to :func:`simulate`."""
    max_length: int | None = None
    """Tokens that a text was cut and padded to; None if the data are no texts."""
    task: Task | None = None
    """What was trained."""
    trained_on: Callable[[], np.ndarray | None] = _not_kept
    """Returns digests of the training examples (``fedjax_peft.simulation.trained_rows``); None if
    they are not known."""
    kept: Mapping[str, PyTree] = field(default_factory=dict)
    """What aggregator, upload transforms and asynchronous server keep, by the names of the fields
    of ``State``."""

    @property
    def trained(self) -> Model:
        """The global model after this run; a new run can start from it."""
        return _merge_into_frozen(self.model, self.algorithm, self.server).replace(
            trainable=self.params
        )

    @property
    def privacy(self) -> str:
        """The guarantee of differential privacy after the last round, in words; empty without."""
        return privacy_in_words(self.metrics)

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients, in the order of their numbers; empty if they have none."""
        return client_names(self.metrics)

    def client_params(self, client: int | str) -> Params:
        """Returns the trainable leaves of one client's model, by its number or its name."""
        check_here(self.out)
        client = client_number(client, self.client_names)
        if client_count(self.client_state):
            check_clients([client], self.client_state)
        kept = client_rows(self.client_state, client)
        own = self.algorithm.model(self.algorithm.server.broadcast(self.server), kept)
        return of_client({**self.params, **own}, self.client_ranks, client)

    def plot(
        self, x: Literal["round", "bytes", "simulated_seconds", "wall_seconds"] = "round"
    ) -> Any:
        """Returns a matplotlib figure of the test score (accuracy, F1) against ``x``."""
        return above("report.plots.plot")(self, x)

    def export(
        self,
        directory: str | Path,
        *,
        format: Literal["peft", "adapterhub", "merged", "hub"] = "peft",
        client: int | str | None = None,
        overwrite: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> Path:
        """Writes an adapter and its head; see :func:`fedjax_peft.peft.io.export.export`.

        Args:
          directory: a directory that is new, is empty, or holds an export of the same content.
          format: ``peft`` (Hugging Face PEFT), ``adapterhub``, ``merged`` (a plain checkpoint), or
            ``hub``: the folder of :meth:`push_to_hub`.
          client: the number or name of the client whose model is exported, in a run whose clients
            keep a state; by default the global model.
          overwrite: also replace an export of other content in the directory.
          dtype: the dtype of the weights of ``merged``. ``bfloat16`` halves the file, and rounds.

        Raises:
          InputError: the format does not support the method; the client does not exist; ``client``
            is missing although some leaves are private, or is given although the clients keep no
            state; or the directory holds anything else.
        """
        from fedjax_peft.peft.io.export import export

        self._warn_personal(client)
        if format == "hub":
            if dtype != "float32":
                raise InputError(f"dtype = {dtype!r} is for the format 'merged'.")
            write, own = above("report.hub.write_run"), {"client": client, "overwrite": overwrite}
            folder: Path = write(self, self._parts(client), directory, **own)
            return folder
        check_format(format, moved=self.algorithm.server.frozen_delta is not None)
        how: dict[str, Any] = {"format": format, "overwrite": overwrite, "run": self.out}
        return export(*self._parts(client), directory, **how, dtype=dtype)

    def push_to_hub(
        self,
        repository: str,
        *,
        directory: str | Path | None = None,
        client: int | str | None = None,
        merged: bool = False,
        license: str | None = None,
        base_model: str | None = None,
        private: bool = False,
        overwrite: bool = False,
    ) -> str | None:
        """Uploads the adapter with a model card made from this run to the Hugging Face hub.

        The folder is written first. If the hub cannot be reached, it stays, and a warning has the
        command that uploads it.

        Args:
          repository: on the hub, such as ``me/my-adapter``; it is made if there is none.
          directory: the folder; by default ``hub`` in the run directory, or without one the
            repository's name in the working directory.
          client: as for :meth:`export`.
          merged: also upload the merged model, in the folder ``merged``.
          license: the hub's identifier of a licence for the adapter, such as ``apache-2.0``.
          base_model: the hub id of the base model; by default where the model came from.
          private: make a repository that others do not see.
          overwrite: as for :meth:`export`.

        Returns:
          The address of the upload; None if the hub has not taken it.

        Raises:
          InputError: as :meth:`export`, or the repository's name cannot be used.
        """
        self._warn_personal(client)
        how = {"client": client, "private": private, "overwrite": overwrite}
        place, chosen = (repository, directory), (merged, license, base_model)
        push = above("report.hub.push_run")
        address: str | None = push(self, self._parts(client), *place, chosen, **how)
        return address

    def predict(
        self,
        texts: Sequence[str] | Dataset | Any,
        pairs: Sequence[str] | None = None,
        *,
        output: "Output" = "logits",
        client: int | str | None = None,
    ) -> np.ndarray:
        """Returns what the model predicts for texts: logits, probabilities or names of classes.

        Texts are cut and padded as in the run.

        Args:
          texts: n texts; or a DataFrame or a list of dicts with a column ``text``, and perhaps
            ``text_pair``; or a data set, such as the ``test`` of ``load_dataset``.
          pairs: n second texts, for a task on pairs of texts.
          output: ``logits`` or ``probabilities``, float32 ``[n, classes]`` in the order of
            ``run.model.labels``; or ``labels``, the names of the most likely classes, ``[n]``.
          client: the number or name of the client whose model predicts, in a run whose clients
            keep a state; by default the global model.

        Raises:
          InputError: the model has no tokenizer; it has no classes of whole texts, and ``output``
            asks for them; the client does not exist; or ``client`` is missing although some leaves
            are private, or is given although the clients keep no state.
        """
        from fedjax_peft.tasks.inference import predict

        how: dict[str, Any] = {"output": output, **self._length()}
        return predict(self.trained, self._params_of(client), texts, pairs, **how)

    def scores_by_class(
        self, data: Dataset | Any = None, *, client: int | str | None = None
    ) -> ByClass:
        """Returns the scores of each class (precision, recall, F1) and the confusion matrix.

        ``print(run.scores_by_class())`` shows them; ``.rows()`` is for a data frame. Classes of a
        tagger are types of entities.

        Args:
          data: labelled examples: a data set, such as the ``test`` of ``load_dataset``, or a table
            with the columns of the task, such as ``text`` and ``label``. By default what the run
            recorded on its test set after its last round, where several personal models are counted
            together.
          client: as for :meth:`predict`.

        Raises:
          InputError: the task has no classes, the run has recorded none, the data do not fit the
            model, or as :meth:`predict`.
        """
        if data is None:
            return self._recorded_by_class(client)
        from fedjax_peft.tasks.inference import scores_by_class

        model = self.trained
        task = self.task if isinstance(self.task, BuiltTask) else classification()
        return scores_by_class(model, self._params_of(client), data, task=task, **self._length())

    def _recorded_by_class(self, client: int | str | None) -> ByClass:
        found = by_class_of(self.metrics).get("test")
        if found is None or client is not None:
            why = "has recorded no scores by class of a test set"
            if client is not None:
                why = "has recorded no scores by class of a single client's model"
            raise InputError(
                f"This run {why}: give labelled examples, run.scores_by_class(data), for"
                " classification or tagging."
            )
        return found

    def _length(self) -> dict[str, int]:
        """Returns the option ``max_length`` of texts; none if the run's data are no texts."""
        return {} if self.max_length is None else {"max_length": self.max_length}

    def generate(
        self, prompts: Sequence[Any], *, client: int | str | None = None, **options: Any
    ) -> list[str]:
        """Returns completions of a language model's prompts; see :func:`fedjax_peft.generate`.

        In a run of instruction tuning or preferences, a prompt has the form of the training
        examples: it is what a user says, or a conversation (a list of messages).

        Args:
          prompts: texts, or conversations.
          client: the number or name of the client whose model generates, in a run whose clients
            keep a state; by default the global model.
          **options: of :func:`fedjax_peft.generate`: ``max_new_tokens``, ``temperature``,
            ``top_p``, ``top_k``, ``seed``, ``batch_size``, and another ``template``.

        Raises:
          InputError: the model has no tokenizer or is no language model; a setting is impossible;
            or ``client`` does not fit (see :meth:`predict`).
        """
        from fedjax_peft.tasks.generation import generate

        task = self.task if isinstance(self.task, BuiltTask) else None
        of_run: dict[str, Any] = {"task": task, "max_length": self.max_length}
        return generate(self.trained, self._params_of(client), prompts, **of_run, **options)

    def _warn_personal(self, client: int | str | None) -> None:
        """Warns of a client's model that the run's guarantee of privacy does not cover."""
        note = "" if client is None else personal_privacy_note(self.metrics)
        if note:
            warnings.warn(note[0].upper() + note[1:], stacklevel=users_level())

    def _parts(self, client: int | str | None) -> tuple[Model, Params]:
        """Returns the model with its trained frozen leaves, and what :meth:`_params_of` returns."""
        return self.model.replace(frozen=self.trained.frozen), self._params_of(client)

    def _params_of(self, client: int | str | None) -> Params:
        """Returns the trainable leaves of a client's model, or of the global one."""
        if client is None:
            clients = client_count(self.client_state)
            advice = f"Choose a client's model: client=0 to client={clients - 1}."
            check_global(self.model, self.algorithm, choose_client(self.out, advice))
            return self.params
        check_here(self.out)
        client = client_number(client, self.client_names)
        check_clients([client], self.client_state)
        if note := untrained_note([client], seen_clients(self.metrics)):
            warnings.warn(note[0].upper() + note[1:], stacklevel=users_level())
        return self.client_params(client)

    def __repr__(self) -> str:
        field = Score("test", judged := headline(self.metrics)).name
        last = last_with(self.metrics, field)
        value = last.get(field)
        number = "not finite" if value is None else f"{value:.4f}"
        result = f", test {judged} {number}" if last else ""
        rounds = counted(max(len(self.metrics) - 1, 0), "round")
        return f"Run({self.algorithm.name}: {rounds}{result})"


def global_leaves(model: Model, algorithm: Algorithm, server: PyTree) -> Params:
    """Returns all trainable leaves of the global model; private ones have initial values."""
    return {**model.trainable, **algorithm.server.model(server)}


def learned_leaves(model: Model, algorithm: Algorithm, server: PyTree) -> Params:
    """Returns the global leaves, and the frozen leaves that the server has changed."""
    frozen = _merge_into_frozen(model, algorithm, server).frozen
    moved = [name for name, x in frozen.items() if x is not model.frozen[name]]
    return {**global_leaves(model, algorithm, server), **tree.select(frozen, moved)}


def _merge_into_frozen(model: Model, algorithm: Algorithm, server: PyTree) -> Model:
    """Returns the model after adding the server's changes to its frozen leaves."""
    frozen_delta = algorithm.server.frozen_delta
    return model if frozen_delta is None else model.merge_into_frozen(frozen_delta(server))
