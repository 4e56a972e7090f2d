"""The objects of a draw: its model, clients and options, and the runs that are made of them.

All runs of a family of draws share one model and one algorithm, so that those of one placement
share their compiled programs.
"""

import functools
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from draws import CHANGING, FAMILY, OWN_OPTIONS, Draw
from flax import nnx

import fedjax_peft as fp
from fedjax_peft import testing

__all__ = ["FEATURES_OF_TABLE", "RANKS", "Built", "model_of"]

RATE = 0.1
CLASSES = tuple("abc")
FEATURES_OF_TABLE = 6


class Network(nnx.Module):
    """Two small layers: the reference engine needs few operations for it."""

    def __init__(self, rngs: nnx.Rngs):
        """Makes a network with random weights."""
        self.one = nnx.Linear(FEATURES_OF_TABLE, 6, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.classifier = nnx.Linear(6, len(CLASSES), rngs=rngs)

    def __call__(self, batch: Any) -> Any:
        """Returns the logits and the features of a batch."""
        hidden = self.drop(jnp.tanh(self.one(batch["x"])))
        return fp.contracts.Outputs(self.classifier(hidden), hidden[:, None])


def _table(examples: int, seed: int) -> fp.Dataset:
    x = np.random.default_rng(seed).normal(size=(examples, FEATURES_OF_TABLE)).astype(np.float32)
    return fp.Dataset({"x": x, "labels": np.argmax(x[:, :3], 1).astype(np.int32)}, CLASSES)


BERT = {
    **testing.TINY_BERT,
    **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "intermediate_size": 24,
}
PLAIN = {
    "net": lambda: fp.bind(Network(nnx.Rngs(0)), head=("classifier",)),
    "two": lambda: fp.random_model(BERT, head=fp.heads.two_classifiers(3), seed=0),
    "bert": lambda: fp.random_model(BERT, head=fp.heads.classification(3), seed=0),
    "bf16": lambda: fp.random_model(
        BERT, head=fp.heads.classification(3), seed=0, dtype="bfloat16"
    ),
    "int8": lambda: fp.random_model(BERT, head=fp.heads.classification(3), seed=0, quantize="int8"),
    "scan": lambda: fp.random_model(
        {**BERT, "num_hidden_layers": 2}, head=fp.heads.classification(3), scan_layers=True
    ),
}
PEFT = {
    "lora": lambda on: fp.lora(rank=4, alpha=4, **on),
    "lora_1": lambda on: fp.lora(rank=1, **on),
    "lora_drop": lambda on: fp.lora(rank=4, dropout=0.2, **on),
    "lora_svd": lambda on: fp.lora(rank=2, init="svd", **on),
    "rslora": lambda on: fp.lora(rank=3, alpha=5, rslora=True, **on),
    "dora": lambda on: fp.peft.dora(rank=2, **on),
    "slora": lambda on: fp.peft.slora(rank=2, density=0.1, **on),
    "lora_sb": lambda on: fp.peft.lora_sb(rank=4, **on),
    "ravan": lambda on: fp.peft.ravan(rank=2, heads=2, **on),
    "lora_sum": lambda on: fp.peft.lora_sum(rank=2, **on),
    "lora_experts": lambda on: fp.peft.lora_experts(rank=2, experts=2, **on),
    "mixed_lora": lambda on: fp.peft.mixed_lora(rank=2, **on),
    "lora_with_base": lambda on: fp.peft.lora_with_base(rank=2, **on),
    "dual_lora": lambda on: fp.peft.dual_lora(rank=2, **({"width": 6} if on else {}), **on),
    "dual": lambda on: fp.peft.dual(size=4),
    "bitfit": lambda on: fp.peft.bitfit(**on),
    "full": lambda on: fp.peft.full(),
    "head_only": lambda on: fp.peft.head_only(),
    "ia3": lambda on: fp.peft.ia3(**({"targets": ["one"], "feed_forward": []} if on else {})),
    "houlsby": lambda on: fp.peft.houlsby(size=4),
    "prefix": lambda on: fp.peft.prefix_tuning(2),
    "layer_norm": lambda on: fp.peft.layer_norm(),
}
RANKS = {"lora": 4, "lora_1": 1, "lora_drop": 4, "rslora": 3, "mixed_lora": 2}
"""PEFT method -> its rank; the others have 2."""
TEXTS = testing.tiny_dataset(60, classes=3, seed=0), testing.tiny_dataset(7, classes=3, seed=1)
TABLE = _table(60, 0), _table(7, 1)
OPTIMIZERS = {
    "sgd": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "adam": lambda rate: optax.adam(rate * 0.1, eps=1e-2),
    "adamw": lambda rate: optax.adamw(rate * 0.1, eps=1e-2, weight_decay=0.1),
    "schedule": lambda rate: optax.sgd(lambda count: rate / (1.0 + count)),
}
SPACE = {
    name: getattr(module, name)
    for module in (fp.aggregators, fp.transforms, fp.privacy, fp.attacks, fp.asynchronous)
    for name in module.__all__
} | {
    "downlink": fp.transforms.downlink,
    "diurnal": fp.availability.diurnal,
    "markov": fp.availability.markov,
}


def evaluated(text: Any) -> Any:
    """Returns the object of a text such as ``median(space='product')``; None of None."""
    return None if text is None else eval(text, dict(SPACE))


def options_of(text: Any) -> dict[str, Any]:
    """Returns the options of a text such as ``devices=4, model_parallel=2``."""
    return eval(f"dict({text})")


@functools.cache
def model_of(kind: str, method: str) -> fp.Model:
    """Returns a model with a PEFT method."""
    return fp.attach(PLAIN[kind](), PEFT[method]({"targets": ["one"]} if kind == "net" else {}))


@functools.lru_cache(maxsize=2)
class Method:
    """The algorithm and what changes its uploads, which the draws of a family share."""

    def __init__(self, fixed: tuple[tuple[str, Any], ...], clients: int):
        """Makes it from the features that a family shares."""
        draw = dict(fixed)
        self.maker = self._maker(draw, clients)
        transforms = (evaluated(draw[name]) for name in ("transform", "second transform"))
        self.changes = {
            "transforms": [x for x in transforms if x is not None] or None,
            "privacy": evaluated(draw["privacy"]),
            "attack": evaluated(draw["attack"]),
        }

    @functools.cached_property
    def algorithm(self) -> Any:
        """The algorithm with the rate as a constant."""
        return self.maker({"rate": RATE})

    @staticmethod
    def _maker(draw: dict[str, Any], clients: int) -> Any:
        options: dict[str, Any] = {}
        for feature, option in {"head": "head", "space": "space", "weighting": "weights"}.items():
            if draw[feature] is not None:
                options[option] = draw[feature]
        if draw["server_schedule"]:
            options["server_schedule"] = fp.schedules.cosine(5)
        if draw["aggregator"]:
            options["aggregator"] = evaluated(draw["aggregator"])
        name = draw["algorithm"]
        options |= {
            "scaffold": {"learning_rate": RATE},
            "gossip": {"clients": clients},
            "hierfavg": {"edges": min(2, clients)},
            "ifca": {"clusters": min(2, clients)},
            "afl": {"clients": clients},
            "q_fedavg": {"lipschitz": 1 / RATE},
            "slora": {"sparse_rounds": 1},
            "hilora": {"clients": clients, "root_rounds": 1, "cluster_rounds": 1},
            "fedlease": {"clients": clients, "warmup_rounds": 1, "max_experts": 2},
            "fra_ffa": {"at": 1},
        }.get(name, {})
        if draw["own option"] != "none" and name in OWN_OPTIONS:
            options |= OWN_OPTIONS[name][draw["own option"] == "second"]
        make, optimizer = getattr(fp.algorithms, name), OPTIMIZERS[draw["optimizer"]]
        keep = fp.optimizers.kept if draw["keep_optimizer"] == "yes" else lambda plain: plain
        return lambda values: make(keep(optimizer(values["rate"])), **options)


class Built:
    """The objects of a draw."""

    def __init__(self, draw: Draw):
        """Makes them; raises ``InputError`` where an object refuses its options."""
        self.draw = draw
        self.model = model_of(draw["model"], draw["peft"])
        self.data, self.test = TABLE if draw["model"] == "net" else TEXTS
        self.sizes = self._sizes()
        self.clients = self._clients(self.sizes, self._weights(), draw["nan client"] == "yes")
        fixed = tuple(x for x in draw.of.items() if x[0] not in CHANGING)
        self.method = Method(fixed, len(self.sizes))
        self.options = self._options()

    def run(
        self, placement: dict[str, Any], out: pathlib.Path | None = None, **given: Any
    ) -> fp.Run:
        """Returns the run with a placement.

        Args:
          placement: fields of ``fp.Placement``.
          out: where it is recorded, with a checkpoint after every round.
          **given: ``model``, ``resume``, ``on_round``; ``constant``: the rate is no run-time value.
        """
        model, constant = given.pop("model", self.model), given.pop("constant", False)
        records = {"progress": False, "on_round": given.pop("on_round", None)}
        if out is not None:
            records["checkpoint_every"], given["out"] = 1, out
        values = {"rate": RATE} if self.draw["rate"] == "value" and not constant else None
        return fp.simulate(
            model,
            self.method.maker if values else self.method.algorithm,
            self.clients,
            values=values,
            placement=fp.Placement(**placement),
            records=fp.Records(**records),
            **self.method.changes,
            **self.options,
            **given,
        )

    def swept(self, placement: dict[str, Any], replicas: int) -> fp.Run:
        """Returns this run as the first of two points of a sweep."""
        options = dict(self.options)
        seed = options.pop("seed")
        points = [{"rate": RATE, "seed": seed}, {"rate": 0.05, "seed": 3}]
        swept = fp.sweep(
            self.model,
            self.method.maker,
            self.clients,
            points=points,
            replicas=replicas,
            placement=fp.Placement(**placement),
            records=fp.Records(progress=False),
            **self.method.changes,
            **options,
        )
        return next(run for name, run in swept.runs.items() if name.endswith(f"seed={seed}"))

    def _random(self, which: int, own: bool = False) -> np.random.Generator:
        """Returns a generator of the draw's family, or of the draw alone."""
        number = self.draw.number if own else self.draw.number // FAMILY
        return np.random.default_rng([self.draw.seed, number, which])

    def _sizes(self) -> list[int]:
        kind = self.draw["clients"]
        count = {"five": 5, "two": 2, "one": 1}.get(kind, 4)
        sizes = self._random(1).integers(1, 7, count)
        if kind == "one is empty":
            sizes[self._random(2).integers(count)] = 0
        if kind == "one example each":
            sizes[:] = 1
        if kind == "one is large":
            sizes[1] = 13
        return [int(size) for size in sizes]

    def _weights(self) -> np.ndarray | None:
        kind = self.draw["weights"]
        if kind is None:
            return None
        weights = np.round(0.01 + 3 * self._random(3, own=True).random(len(self.sizes)), 2)
        if kind == "one is 0":
            weights[self._random(4, own=True).integers(len(weights))] = 0
        return weights

    def _clients(
        self, sizes: list[int], weights: np.ndarray | None = None, nan: bool = False
    ) -> fp.Clients:
        rows = self._random(5).permutation(len(self.data)).astype(np.int32)[: sum(sizes)]
        parts = tuple(np.split(rows, np.cumsum(sizes)[:-1]))
        data = self.data
        if nan and sizes[0]:  # whatever client 0 learns is NaN
            x = data.columns["x"].copy()
            x[parts[0]] = np.nan
            data = fp.Dataset({**data.columns, "x": x}, data.label_names, "nan")
        return fp.Clients(data, parts, weights=weights)

    def _options(self) -> dict[str, Any]:
        draw = self.draw
        return {
            "rounds": draw["rounds"],
            "batch_size": draw["batch_size"],
            "batch_sampling": draw["batch_sampling"],
            "sampling": draw["sampling"],
            **self._cohort(),
            **options_of(draw["work"]),
            "seed": int(self._random(6, own=True).integers(1000))
            if draw["key"] == "random"
            else draw["key"],
            "asynchronous": evaluated(draw["asynchronous"]),
            "test": self.test if draw["test"] in ("global", "both") else None,
            "validation": self.test.take(np.arange(4)) if draw["validation"] == "yes" else None,
            "system": self._system(),
            "evaluation": self._evaluation(),
        }

    def _cohort(self) -> dict[str, int]:
        draw, count = self.draw, len(self.sizes)
        if draw["cohort"] == "not given":
            return {}
        if draw["sampling"] == "size":
            count = sum(size > 0 for size in self.sizes)
        wanted = {"one": 1, "two": 2, "three": 3, "all": count}[draw["cohort"]]
        return {"clients_per_round": max(1, min(wanted, count))}

    def _system(self) -> fp.System:
        draw = self.draw
        system: dict[str, Any] = {"availability": evaluated(draw["availability"])}
        if draw["client_ranks"]:
            full = RANKS.get(draw["peft"], 2)
            ranks = [min(rank, full) for rank in eval(f"[{draw['client_ranks']}]")]
            system["client_ranks"] = ranks
        if draw["stragglers"] == "yes":
            system["stragglers"] = 0.5
        if draw["failures"]:
            system["failure_rate"] = 0.99 if "0.99" in draw["failures"] else 0.3
            system["failure_exponent"] = 1.0 if "slow" in draw["failures"] else 0.0
        if draw["deadline"] is not None:
            system |= {"deadline": draw["deadline"], "late": draw["late"]}
        time = fp.TimeModel(seconds_per_step=draw["step seconds"], spread=draw["spread"])
        return fp.System(time=time, **system)

    def _evaluation(self) -> fp.Evaluation:
        draw = self.draw
        options: dict[str, Any] = {"every": draw["every"], "batch_size": 7}
        if draw["diagnostics"]:
            options["diagnostics"] = draw["diagnostics"].split(", ")
        if draw["test"] in ("clients", "both"):
            sizes = [int(x) for x in self._random(7).integers(1, 4, len(self.sizes))]
            options |= {"client_test": self._clients(sizes), "test_clients": 2}
        return fp.Evaluation(**options)
