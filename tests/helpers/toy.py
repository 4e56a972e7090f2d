"""A toy problem that compiles quickly: LoRA on one frozen matrix, and a softmax head.

It has all kinds of leaves that the engine supports (frozen, fixed, adapter, head), and dropout.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from internals import (
    Computation,
    Schedule,
    Session,
    Setup,
    assign_roles,
    build_round,
    make_plan,
    rank_masks,
    stream,
)

import fedjax_peft as fp

FEATURES, WIDTH, RANK, CLASSES = 5, 6, 2, 3
KINDS = {
    "head.bias": "head",
    "head.kernel": "head",
    "layer.lora_a": "adapter",
    "layer.lora_b": "adapter",
    "layer.lora_scale": "fixed",
}
SHARED = ("head.bias", "head.kernel", "layer.lora_a", "layer.lora_b")
HEAD, ADAPTER = SHARED[:2], SHARED[2:]
LORA = ("lora_a", "lora_b", "lora_scale")


def read_out(params, hidden) -> fp.contracts.Outputs:
    """Returns the outputs of the head."""
    logits = hidden @ params["head.kernel"] + params["head.bias"][None]
    return fp.contracts.Outputs(logits, hidden[:, None])


def apply_with(dropout):
    """Returns ``softmax(dropout(tanh(x W + s x A B)) H + b)`` as an ``ApplyFn``."""

    def apply(frozen, trainable, batch, key, train):
        x = batch["x"]
        low = (x @ trainable["layer.lora_a"]) * trainable["layer.lora_scale"][None]
        hidden = jnp.tanh(x @ frozen["layer.kernel"] + low @ trainable["layer.lora_b"])
        if train and dropout:
            kept = jax.random.bernoulli(key, 1 - dropout, hidden.shape)
            hidden = jnp.where(kept, hidden / (1 - dropout), 0.0)
        return read_out(trainable, hidden)

    return apply


def model(*, dropout=0.2, features=FEATURES, width=WIDTH, rank=RANK, **changes) -> fp.Model:
    """Returns the model with random leaves, none of them zero (a zero B hides mistakes)."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    trainable = {
        "head.bias": draw(CLASSES),
        "head.kernel": draw(width, CLASSES),
        "layer.lora_a": draw(features, rank),
        "layer.lora_b": draw(rank, width),
        "layer.lora_scale": jnp.full(rank, 1.5),
    }
    frozen = {"layer.kernel": draw(features, width)}
    labels = tuple(f"class {i}" for i in range(CLASSES))
    bound = fp.Model(apply_with(dropout), frozen, trainable, KINDS, None)
    return bound.replace(name="toy", labels=labels, **changes)


def lora_model(**options) -> fp.Model:
    """Returns the model with the frozen kernel under the name that ``peft.lora`` gives it."""
    plain = model(**options)

    def apply(frozen, *rest):
        return plain.apply({"layer.kernel": frozen["layer.base.kernel"]}, *rest)

    return plain.replace(apply=apply, frozen={"layer.base.kernel": plain.frozen["layer.kernel"]})


def text_model() -> fp.Model:
    """Returns the model on the mean of fixed embeddings of a text's tokens."""
    plain = lora_model()
    table = jnp.asarray(np.random.default_rng(2).normal(size=(64, FEATURES)), jnp.float32)

    def apply(frozen, trainable, batch, key, train):
        real = batch["attention_mask"][..., None]
        total = jnp.sum(jnp.where(real, table[batch["input_ids"]], 0.0), axis=1)
        x = total / jnp.maximum(jnp.sum(real, axis=1), 1)
        return plain.apply(frozen, trainable, {"x": x}, key, train)

    return plain.replace(apply=apply)


def own_kernel_model() -> fp.Model:
    """Returns the model whose kernel under LoRA is trained too, for pFedLoRA."""
    plain = lora_model(dropout=0)
    name = "layer.base.kernel"

    def apply(frozen, params, *rest):
        return plain.apply({**frozen, name: params[name]}, params, *rest)

    trainable = {**plain.trainable, name: plain.frozen[name]}
    return plain.replace(
        apply=apply, frozen={}, trainable=trainable, kinds={**KINDS, name: "adapter"}
    )


def several_loras(plain, owners, seed):
    """Returns the kinds and the leaves of a LoRA for each owner and of the head, and a generator.

    None of the LoRAs is zero.
    """
    rng, kinds = np.random.default_rng(seed), dict.fromkeys(HEAD, "head")
    leaves = {n: plain.trainable[n] for n in HEAD}
    for owner in owners:
        for leaf in LORA:
            x = plain.trainable[f"layer.{leaf}"]
            kinds[f"layer.{owner}.{leaf}"] = KINDS[f"layer.{leaf}"]
            drawn = x if leaf == "lora_scale" else jnp.float32(rng.normal(0, 0.5, x.shape))
            leaves[f"layer.{owner}.{leaf}"] = drawn
    return kinds, leaves, rng


def hidden_of(frozen, params, x, shares):
    """Returns ``tanh(x W + the sum of share * s x A B)`` for the share of each owner of a LoRA."""
    inner = x @ frozen["layer.base.kernel"]
    for owner, share in shares.items():
        a, b, s = (params[f"layer.{owner}.{leaf}"] for leaf in LORA)
        inner = inner + share * (((x @ a) * s[None]) @ b)
    return jnp.tanh(inner)


def mixture_model() -> fp.Model:
    """Returns the model with an individual and a rest-of-world LoRA and a mixer, for FedALT."""
    plain = lora_model(dropout=0)
    kinds, trainable, rng = several_loras(plain, ("individual", "rest_of_world"), 1)
    kinds["layer.mixer"] = "adapter"
    trainable["layer.mixer"] = jnp.float32(rng.normal(0, 0.5, (FEATURES, 2)))

    def apply(frozen, params, batch, key, train):
        mixed = jax.nn.softmax(batch["x"] @ params["layer.mixer"])
        shares = {"rest_of_world": mixed[:, :1], "individual": mixed[:, 1:]}
        return read_out(params, hidden_of(frozen, params, batch["x"], shares))

    return plain.replace(apply=apply, trainable=trainable, kinds=kinds)


def dual_model() -> fp.Model:
    """Returns a model with a global and a private adapter and two classifiers, for FedMCP."""
    rng = np.random.default_rng(0)
    kinds, trainable = {}, {}

    def add(name, kind, *shape):
        kinds[name] = kind
        trainable[name] = jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

    for own in ("global", "private"):
        add(f"layer.{own}_adapter.down.kernel", "adapter", WIDTH, 2)
        add(f"layer.{own}_adapter.up.kernel", "adapter", 2, WIDTH)
    for name in ("classifier", "second_classifier"):
        add(f"{name}.kernel", "head", WIDTH, CLASSES)

    def apply(frozen, params, batch, key, train):
        h = jnp.tanh(batch["x"] @ frozen["layer.kernel"])
        if train:
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
        for own in ("global", "private"):
            adapter = f"layer.{own}_adapter"
            low = jnp.tanh(h @ params[f"{adapter}.down.kernel"])
            h = h + 0.5 * low @ params[f"{adapter}.up.kernel"]
        logits, second = (h @ params[f"{n}.kernel"] for n in ("classifier", "second_classifier"))
        return fp.contracts.Outputs(logits, h[:, None], second=second)

    plain = model(dropout=0)
    return plain.replace(apply=apply, trainable=trainable, kinds=kinds)


EXPERTS = ("own", "other_1", "other_2", "other_3")


def experts_model() -> fp.Model:
    """Returns the model with four LoRA experts and a router, for FedLEASE."""
    plain, room = lora_model(dropout=0), len(EXPERTS)
    kinds, trainable, rng = several_loras(plain, EXPERTS, 1)
    kinds["layer.router"] = "adapter"
    trainable["layer.router"] = jnp.float32(rng.normal(0, 2, (FEATURES, 2 * room - 1)))

    def apply(frozen, params, batch, key, train):
        x, a = batch["x"], [params[f"layer.{owner}.lora_a"] for owner in EXPERTS]
        there = jnp.array([True, *(jnp.any(one != 0) for one in a[1:])])
        count = jnp.sum(there)
        open_ = jnp.concatenate([jnp.arange(room) < count, there[1:]])
        logits = jnp.where(open_[None], x @ params["layer.router"], -jnp.inf)
        top, place = jax.lax.top_k(logits, room)
        weights = jax.nn.softmax(jnp.where((jnp.arange(room) < count)[None], top, -jnp.inf))
        expert = jnp.maximum(place - (room - 1), 0)
        shares = {
            owner: jnp.sum(jnp.where(expert == i, weights, 0.0), axis=1, keepdims=True)
            for i, owner in enumerate(EXPERTS)
        }
        return read_out(params, hidden_of(frozen, params, x, shares))

    return plain.replace(apply=apply, trainable=trainable, kinds=kinds)


TIERS = ("root", "cluster", "leaf")


def sum_model() -> fp.Model:
    """Returns the model with three LoRAs that add up, for HiLoRA."""
    plain = lora_model(dropout=0)
    kinds, trainable, _ = several_loras(plain, TIERS, 1)

    def apply(frozen, params, batch, key, train):
        return read_out(params, hidden_of(frozen, params, batch["x"], dict.fromkeys(TIERS, 1)))

    return plain.replace(apply=apply, trainable=trainable, kinds=kinds)


def dataset(examples: int, *, features: int = FEATURES, seed: int = 0) -> fp.Dataset:
    """Returns examples that a linear rule labels."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, features)).astype(np.float32)
    labels = np.argmax(x[:, :CLASSES] + 0.3 * rng.normal(size=(examples, CLASSES)), axis=1)
    names = tuple(f"class {i}" for i in range(CLASSES))
    return fp.Dataset({"x": x, "labels": labels.astype(np.int32)}, names, "toy")


def clients(sizes, *, seed: int = 0) -> fp.Clients:
    """Returns clients of the given sizes, which partition a data set."""
    total = sum(sizes)
    order = np.random.default_rng(seed + 1).permutation(total).astype(np.int32)
    return fp.Clients(dataset(total, seed=seed), tuple(np.split(order, np.cumsum(sizes)[:-1])))


def poisoned(federation: fp.Clients, *which: int) -> fp.Clients:
    """Returns the clients with one example of each named client turned infinite."""
    x = federation.data.columns["x"].copy()
    for client in which:
        x[federation.indices[client][0]] = np.inf
    columns = {**federation.data.columns, "x": x}
    data = replace(federation.data, columns=columns, name="poisoned")
    return fp.Clients(data, federation.indices)


def context(round_index=1, metrics=None) -> fp.contracts.RoundContext:
    """Returns the context of a round in which all five clients took part."""
    return fp.contracts.RoundContext(
        round_index=jnp.int32(round_index),
        participants=jnp.float32(5),
        total_clients=5,
        metrics=metrics or {},
        fixed={},
        key=stream(0, "server"),
        sampling_probability=1.0,
        clients=jnp.arange(5),
    )


class Result(NamedTuple):
    """A round of :class:`Engine`, on the host; its first two fields are the next round's state."""

    server: Any
    client_state: Any
    sums: dict
    finite: np.ndarray
    norms: np.ndarray
    sent_leaves: dict
    aggregation: dict
    shares: dict
    transform_state: Any = ()

    @property
    def state(self):
        """The state with which the next round begins."""
        more = () if self.transform_state == () else (self.transform_state,)
        return (self.server, self.client_state, *more)


class Engine:
    """A session of an algorithm on the toy problem, with cohorts given by the test."""

    def __init__(
        self,
        algorithm,
        federation,
        *,
        per_round,
        lanes,
        epochs=1,
        local_steps=None,
        bound=None,
        ranks=None,
        transform=None,
        stages=fp.contracts.Stages(),  # noqa: B008, a tuple
        engine="compiled",
    ):
        bound = bound or model()
        names = assign_roles(bound.kinds, algorithm.roles)
        self.shared = fp.tree.select(bound.trainable, names["shared"])
        self.leaves = fp.tree.select(bound.trainable, names["private"])
        self.algorithm, self.bound, self.clients = algorithm, bound, len(federation)
        self.client_state = algorithm.init_client_state(self.shared, self.leaves)
        self.schedule = Schedule(federation.indices, per_round, 4, epochs, local_steps, 0)
        fixed = fp.tree.select(bound.trainable, names["fixed"])
        parts = (bound.apply, fp.tasks.classification(), bound.frozen, fixed)
        self.setup = Setup(algorithm, *parts, self.clients)._replace(
            total_clients=int((federation.sizes > 0).sum()),
            sampling_probability=per_round / self.clients,
            transform=transform,
            stages=stages,
        )
        self.lanes, self.engine, self.columns = lanes, engine, federation.data.columns
        self.setup = self.with_ranks(ranks)
        self.session = self.session_on()

    def with_ranks(self, ranks):
        """Returns the setup, with clients of these ranks if any are given."""
        if ranks is None:
            return self.setup
        return self.setup._replace(rank_mask=rank_masks(self.bound, ranks, self.clients))

    def session_on(self, columns=None, ranks=None):
        """Returns the session on other examples or ranks; the same shapes compile nothing anew."""
        setup, columns = self.with_ranks(ranks), self.columns if columns is None else columns
        leaves = (self.shared, self.leaves)
        computation = Computation(self.lanes, rounds=20, engine=self.engine)
        return Session(setup, leaves, self.schedule, columns, computation)

    def model_at_start(self):
        """Returns the initial shared and private leaves."""
        return {**self.shared, **self.leaves}

    def start(self):
        """Returns the states of server, clients and transform, if any; all to be consumed."""
        state = self.session.init(0)
        own = () if self.setup.transform is None else (state.transform_state,)
        return (state.server, state.client_state, *own)

    def plan(self, cohort):
        """Returns the plan of a given cohort, with the shape of all plans."""
        template = self.session.plan(1)
        return make_plan(
            cohort,
            template.lanes,
            time_steps=len(template.slot),
            slots=len(template.client),
            batch_size=self.schedule.batch_size,
        )

    def traced(self, algorithm=None, **state):
        """Returns the state before round 1 and the shapes of its results, but compiles nothing.

        Args:
          algorithm: another one, which takes the same state.
          state: parts of the state that are replaced.
        """
        setup, plan = self.setup, self.plan(self.schedule.cohort(1))
        round_ = build_round(setup._replace(algorithm=algorithm or self.algorithm))
        before = self.session.init(0).on_device()._replace(**state)
        constants = (setup.frozen, setup.fixed, setup.rank_mask or {}, dict(self.columns))
        inputs = (*constants, before, plan, stream(0, "clients"), jnp.int32(1))
        return before, jax.eval_shape(round_, *inputs)

    def rounds(self, numbers=(1, 2), state=None, **others):
        """Returns the results of rounds of the schedule's cohorts that follow each other."""
        results = []
        for number in numbers:
            state = results[-1].state if results else state
            results.append(self.run(self.schedule.cohort(number), number, state, **others))
        return results

    def run(self, cohort, round_index=1, state=None, columns=None, ranks=None):
        """Returns the result of one round, on the host.

        With ``columns`` or ``ranks`` the same program runs on others of the same shapes.
        """
        others = columns is not None or ranks is not None
        session = self.session_on(columns, ranks) if others else self.session
        server, client_state, *transform_state = jax.tree.map(jnp.asarray, state or self.start())
        state = fp.State(server, client_state, (), *transform_state, round_index=round_index - 1)
        plan = self.plan(cohort)
        if plan.useful:
            state, info = session.step(state, plan)
        else:  # a step would run nothing, and the program's own answer is of interest
            info = session.program(plan)(state, plan, round_index)
            state = info.state
        fields = (getattr(info, name) for name in Result._fields[2:-1])
        result = Result(state.server, state.client_state, *fields, state.transform_state)
        return jax.device_get(result)
