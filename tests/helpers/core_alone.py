"""Imports the core without the libraries of the shell, and runs rounds of a hand-written model.

``test_core.py`` runs this file in a new process. Each refused import is an error.
"""

import importlib
import pkgutil
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

ROOMS = (
    *("contracts", "numerics", "engine", "algorithms", "aggregators", "transforms", "attacks"),
    *("privacy", "asynchronous", "availability"),
)
SHELL = {"transformers", "datasets", "pydantic", "matplotlib", "sklearn", "orbax", "torch"}
MODULES = {"flax", "rich"}
"""What only PEFT methods need: Flax, and what Flax imports."""


class Refusal:
    """Refuses to import libraries, as if they were not installed."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"The core imports {name}.")


def import_all(room: str, but: str = "nothing") -> None:
    """Imports all modules of a room, except those of the package ``but``."""
    package = importlib.import_module(f"fedjax_peft.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not f"{module.name}.".startswith(f"{package.__name__}.{but}."):
            importlib.import_module(module.name)


def check_nothing_is_loaded(names) -> None:
    loaded = names & {*sys.modules}
    assert not loaded, f"The core loaded {loaded}."


class Regression(NamedTuple):
    """A hand-written task: least squares."""

    headline: str = "error"
    lower_is_better: tuple[str, ...] = ("error",)
    predict: Any = None
    score: Any = None

    def loss(self, outputs, batch):
        error = jnp.where(batch["mask"], (outputs.logits[:, 0] - batch["y"]) ** 2, 0.0)
        return error.sum(), batch["mask"].sum()

    def metrics(self, outputs, batch):
        return {"error": self.loss(outputs, batch)}


def apply(frozen, trainable, batch, key, train):
    """A hand-written model: a frozen and a trained matrix."""
    from fedjax_peft.contracts import Outputs

    hidden = batch["x"] @ (frozen["base"] + trainable["update"])
    return Outputs(hidden, hidden[:, None])


def columns():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.float32([1, -2, 0.5])}


FROZEN, UPDATE = {"base": jnp.zeros((3, 1))}, {"update": jnp.zeros((3, 1))}
CLIENTS = [np.arange(0, 4), np.arange(4, 8), np.arange(8, 12)]


def learn(session) -> float:
    """Returns the distance from the exact weights after a few rounds."""
    state = session.init(0)
    for _ in range(20):
        state, _ = session.step(state)
    update = session.setup.algorithm.server.broadcast(state.server)["update"]
    return float(jnp.abs(update[:, 0] - jnp.array([1, -2, 0.5])).max())


def run_the_engine() -> float:
    from fedjax_peft import algorithms
    from fedjax_peft.engine.computation import Computation
    from fedjax_peft.engine.schedule import Schedule
    from fedjax_peft.engine.session import Session
    from fedjax_peft.engine.setup import Setup

    algorithm = algorithms.fedavg(optax.sgd(0.1))
    setup = Setup(algorithm, apply, Regression(), FROZEN, {}, len(CLIENTS))
    schedule = Schedule(CLIENTS, 3, 2, epochs=2, local_steps=None, seed=0)
    return learn(Session(setup, (UPDATE, {}), schedule, columns(), Computation(lanes=1)))


def run_a_session() -> float:
    import fedjax_peft as fp

    model = fp.Model(apply, FROZEN, UPDATE, {"update": "adapter"}, None)
    clients = fp.Clients(fp.Dataset(columns()), CLIENTS)
    algorithm = fp.algorithms.fedavg(optax.sgd(0.1))
    return learn(
        fp.session(
            model,
            algorithm,
            clients,
            task=Regression(),
            batch_size=2,
            epochs=2,
            placement=fp.Placement(lanes=1),
        )
    )


if __name__ == "__main__":
    refusal = Refusal(SHELL | MODULES)
    sys.meta_path.insert(0, refusal)
    for name in ROOMS:
        import_all(name)
    print("engine", run_the_engine())
    check_nothing_is_loaded(refusal.names)

    refusal.names = SHELL
    import_all("peft", but="io")
    print("session", run_a_session())
    check_nothing_is_loaded(refusal.names)
