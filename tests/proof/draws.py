"""Settings of whole small runs, drawn from a seed: which features, with which values.

A draw is a table of features, each with one value. It says everything about a run, and costs
nothing: :mod:`built` makes objects of it. Features that are known not to go together are taken
apart (:func:`settled`), for a refused run proves little; one draw of twenty is left as it fell.

Compiling takes most of the time. So :data:`FAMILY` draws in turn share all features that a compiled
round depends on, and differ in the :data:`CHANGING` ones: the weights, the seed, who fails or is
late, where states are kept, what is compared ...

A draw of a given seed and number stays what it is: a new feature goes to the end of
:data:`FEATURES`, and a new value changes that feature alone.
"""

import inspect
from typing import Any, NamedTuple

import numpy as np

import fedjax_peft as fp

__all__ = ["CHANGING", "FAMILY", "FEATURES", "OWN_OPTIONS", "OWN_PEFT", "Draw", "draw"]

Value = str | int | float | None


class Draw(NamedTuple):
    """A drawn run."""

    seed: int
    number: int
    of: dict[str, Value]
    """Feature -> value."""

    def __getitem__(self, feature: Any) -> Value:
        """Returns the value of a feature."""
        return self.of[feature]


def _even(*values: Value, weight: float = 1.0) -> dict[Value, float]:
    return dict.fromkeys(values, weight)


def _mostly(usual: Value, weight: float, *others: Value) -> dict[Value, float]:
    return {usual: weight, **_even(*others)}


def _sometimes(share: float) -> dict[Value, float]:
    return {"no": 1 - share, "yes": share}


ALGORITHMS = (
    *("apfl", "centralised", "ditto", "fedadagrad", "fedadam", "fedalt", "fedavg", "fedavgm"),
    *("fedbabu", "feddyn", "fedex", "fedmomentum", "fednova", "fedper", "fedprox", "fedrep"),
    *("fedrot", "fedsa", "fedsb", "fedsvd", "fedyogi", "ffa", "flora", "fra_ffa", "hetlora"),
    *("hilora", "local", "lora_a2", "moon", "pfedlora", "ravan", "rolora", "scaffold"),
)
ZEROTH = ("fedkseed", "fedmezo")
"""They have taken a part of the chance of S-LoRA, so that other draws stay what they were."""
OF_LOSSES = ("afl", "q_fedavg")
"""Clients send their loss. They have taken a part of the chance of S-LoRA too."""
ROWS = ("gossip", "hierfavg", "ifca")
"""They and FedLEASE have too."""
DRAWING = ("fslora", "fedplora")
"""They and FedASK have taken a part of it too."""
SLOW = ("pfedme", "fedmcp", "fedmatch", "feddpa_f", "feddpa_t")
"""Their programs take longest to compile."""

FEATURES: dict[str, dict[Value, float]] = {
    "as it fell": _sometimes(0.05),
    "algorithm": {
        **_even(*ALGORITHMS),
        **{**_even(*DRAWING, "fedask", *OF_LOSSES, *ROWS, weight=0.05), "slora": 0.15},
        "fedlease": 0.05,
        **{**_even(*ZEROTH, weight=0.2), **_even(*SLOW, weight=0.25)},
    },
    "model": {"net": 60, "bert": 2, "bf16": 1, "int8": 1, "scan": 1},
    "peft": {
        **{"lora": 10, "lora_1": 2, "full": 1, "head_only": 1, "bitfit": 1},
        **_even("lora_drop", "lora_svd", "rslora", "dora"),
        **_even("ia3", "houlsby", "prefix", "layer_norm", weight=2),
    },
    "clients": {
        **{"four": 6, "five": 1, "two": 1, "one": 1, "one is empty": 3},
        **{"one example each": 1.5, "one is large": 1},
    },
    "weights": {None: 8, "random": 1, "one is 0": 1},
    "optimizer": _mostly("sgd", 4, "momentum", "adam", "schedule", "adamw"),
    "rate": {"constant": 1, "value": 1},
    "own option": {"none": 3, "first": 1, "second": 1},
    "head": _mostly(None, 7, "shared", "private", "frozen"),
    "weighting": _mostly(None, 3, "size", "uniform"),
    "keep_optimizer": _sometimes(0.3),
    "space": {None: 3, "product": 2},
    "server_schedule": {None: 4, "cosine": 1},
    "aggregator": {
        **_mostly(
            None,
            30,
            *("mean()", "median()", "trimmed_mean(0.2)", "krum(1)", "multi_krum(1)", "bulyan(0)"),
            *("geometric_median()", "centred_clipping(0.5)", "centred_clipping()", "fltrust(0)"),
            *("norm_bounding(0.1)", "norm_bounding()", "krum(0)", "multi_krum(0)", "fra()"),
            *("flexlora()", "ilora()", "hetlora()", "flora_na(steps=2)", "lora_fair(steps=2)"),
            *("lora_fair(solver='least_squares')", "fra(split='B')", "fra(rank=2)"),
            *("median(space='product')", "trimmed_mean(0.2, space='product')"),
            "geometric_median(space='product')",
        ),
        **{"geometric_median(space='product')": 0.5, "raflora()": 0.5},
    },
    "transform": _mostly(
        None,
        50,
        *("clip_norm(0.05)", "top_k(0.3)", "top_k(0.3, across_leaves=True)", "random_k(0.5)"),
        *("random_k(0.5, error_feedback=True)", "quantize(4)", "quantize(4, stochastic=False)"),
        *("sign()", "ternary()", "int8()", "nf4(error_feedback=True)", "power_sgd(1)"),
        *("top_directions(1)", "top_directions(1, by='product')", "flasc(0.5, 0.5)"),
        *("sign(error_feedback=False)", "ternary(error_feedback=True)", "int8(3)"),
        *("quantize(2, norm='l2')", "random_k(1.0)", "top_k(1.0)"),
    ),
    "second transform": {
        **{None: 12, "clip_norm(0.05)": 1, "top_k(0.5)": 1},
        **_even("downlink(int8())", "downlink(quantize(4))", "sign()"),
        "downlink(top_k(0.3, error_feedback=False))": 1,
    },
    "privacy": _mostly(
        None,
        18,
        *("central(0.1, 0.5)", "adaptive(0.1, 0.5)", "local(0.1, 0.5)", "laplace(0.1, 0.5)"),
        *("distributed(0.1, 0.5)", "distributed(0.1, 0.5, dropouts=0.5)", "paper_noise(0.01)"),
        *("example(0.1, 0.5)", "example(0.1, 0.5, microbatch=1)"),
        *("correlated(0.1, 0.5, rounds=3)", "adaptive(0.1, 0.5, quantile=0.9)"),
    ),
    "attack": _mostly(
        None,
        18,
        *("sign_flip(0.4)", "sign_flip(1.0)", "scaled(0.4, 5.0)", "gaussian(0.4, 0.1)"),
        *("alie(0.4)", "ipm(0.4)", "min_max(0.4)", "label_flip(0.4)", "label_flip(1.0)"),
        "backdoor(0.4, 1, token=5)",
    ),
    "asynchronous": _mostly(
        None,
        14,
        *("fedbuff(buffer_size=2)", "fedbuff(buffer_size=1, max_staleness=1)", "fedasync(0.5)"),
        "fedbuff(buffer_size=3, staleness='hinge', grace=0, weights='size')",
        *("semi_synchronous(6.0)", "fedasync(staleness='constant')"),
        "semi_synchronous(3.0, max_staleness=1, weights='uniform')",
    ),
    "availability": _mostly(None, 7, "diurnal(40.0, 0.6)", "markov(30.0, 20.0)"),
    "client_ranks": {None: 8, "1, 2, 4": 1, "2, 1": 1, "1,": 1, "0, 2": 0.4},
    "step seconds": _even(0.5, 1.0),
    "spread": {0.0: 1, 0.7: 1},
    "rounds": {1: 1, 2: 6, 3: 2},
    "batch_size": {4: 3, 1: 1, 64: 1},
    "key": {"random": 8, **_even(0, 2**31, 2**32 - 1, 2**63 - 1)},
    "sampling": {"uniform": 4, "size": 1, "poisson": 2, "round_robin": 1, "all": 2},
    "cohort": {"two": 3, "three": 2, "one": 1, "all": 1, "not given": 1},
    "work": {
        **{"epochs=1": 3, "epochs=2": 1, "epochs=(1, 2)": 1},
        **_even("local_steps=1", "local_steps=2", "local_steps=(1, 3)"),
    },
    "stragglers": {"no": 3, "yes": 1},
    "batch_sampling": {"shuffled": 9, "poisson": 1},
    "failures": {None: 7, "rate 0.3": 1.5, "rate 0.3, slow clients": 1.5, "rate 0.99": 0.5},
    "deadline": {None: 8, 1.5: 1, 2.5: 1, 1e-6: 0.5},
    "late": _even("drop", "partial"),
    "diagnostics": {
        **{None: 24, "clients": 2, "local": 2, "variation": 2, "spectrum": 2, "cka": 1},
        "clients, local, variation, spectrum": 1,
    },
    "every": _even(1, 2, 9),
    "test": {None: 6, "global": 2, "clients": 1, "both": 1},
    "validation": _sometimes(0.1),
    "nan client": _sometimes(0.1),
    "lanes": {1: 2, 2: 2, 3: 1, 4: 1},
    "buckets": {0: 1, 1: 1, 4: 2},
    "other lanes": {"same": 4, 1: 1, 2: 1, 3: 1, 4: 1},
    "other buckets": {"same": 4, 0: 1, 1: 1, 4: 1},
    "other client_state": {"device": 1, "host": 1, "disk": 2},
    "other examples": {"device": 1, "host": 1},
    "other reuse": {"none": 3, "exact": 1},
    "mesh": _even(
        "devices=4",
        "devices=4, model_parallel=2",
        "devices=2, model_parallel=2, model_sharding='gather'",
        "devices=3",
    ),
    "reference": _sometimes(0.2),
    "places": _sometimes(0.7),
    "resume": _sometimes(0.3),
    "sweep": _sometimes(0.1),
    "turn": _sometimes(0.03),
}
"""Feature -> {value: weight}. The last ones are where a run is done again, and comparisons."""

FAMILY = 8
CHANGING = (
    *("weights", "availability", "step seconds", "spread", "rounds", "key", "stragglers"),
    *("failures", "deadline", "late", "every", "validation", "nan client"),
    *("reference", "places", "resume", "turn"),
)

OWN_PEFT = {
    **{"slora": "slora", "fedsb": "lora_sb", "ravan": "ravan", "hilora": "lora_sum"},
    **{"fedalt": "mixed_lora", "pfedlora": "lora_with_base", "fedmcp": "dual", "fedmatch": "dual"},
    **{"feddpa_f": "dual_lora", "feddpa_t": "dual_lora", "fedlease": "lora_experts"},
}
"""Algorithm -> the only PEFT method that it can train."""

OWN_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "apfl": ({"adaptive": True}, {"alpha": 1.0}),
    "ditto": ({"lam": 0.0}, {"lam": 5.0}),
    "fedavgm": ({"nesterov": True}, {"momentum": 0.0}),
    "fedadam": ({"b1": 0.0}, {"start": 1.0}),
    "fedmcp": ({"similarity": "cosine"}, {"mu": 0.0}),
    "fedprox": ({"mu": 0.0}, {"mu": 1.0}),
    "fedrep": ({"tune_epochs": 1}, {"head_epochs": 2}),
    "feddpa_f": ({"tune_epochs": 0}, {"tune_epochs": 2}),
    "fedsvd": ({"period": 2}, {"period": 1}),
    "fedask": ({"train": "B"}, {"oversampling": 0}),
    "fedplora": ({"ranks": 1}, {"ranks": (1, 2)}),
    "fslora": ({"ranks": 1}, {"ranks": (1, 2)}),
    "fra_ffa": ({"trigger": "plateau"}, {"trigger": "subspace"}),
    "hetlora": ({"prune": 0.5}, {"penalty": 0.1}),
    "lora_a2": ({"budget": (1, 2)}, {"budget": 1}),
    "moon": ({"mu": 0.0}, {"temperature": 0.1}),
    "pfedme": ({"beta": 0.5}, {"inner_steps": 1}),
    "fedmomentum": ({"energy": 0.5}, {"energy": 1.0}),
    "fedrot": ({"strength": 0.0}, {"first": "B"}),
}
"""Algorithm -> options of its own, of which a draw has none, the first or the second."""

LORA = ("lora", "lora_1", "lora_drop", "lora_svd", "rslora", "dora")
OF_TEXTS = ("ia3", "houlsby", "prefix", "layer_norm")
NEED_LORA = (
    *("fedex", "fedmomentum", "fedrot", "fedsa", "fedsvd", "ffa", "flora", "fra_ffa", "hetlora"),
    *("lora_a2", "rolora", "fedask", *DRAWING),
)
HEADS = {"fedper": "private", "fedrep": "private", "fedbabu": "frozen"}
"""Algorithms that have one kind of head."""
RELAYED = ("fedex", "fedmomentum", "flora")
STAGED = ("fra_ffa", "hilora", "slora")
TURNS = ("lora_a2", "rolora")
FACTORING = ("fra", "flexlora", "ilora", "hetlora", "flora_na", "lora_fair", "raflora")
"""Aggregators that need LoRA's factors, both of them shared."""
ROBUST = (
    *("median", "trimmed", "krum", "multi_krum", "bulyan", "geometric", "centred", "fltrust"),
    "norm_bounding",
)


def draw(seed: int, number: int) -> Draw:
    """Returns the draw of a seed and a number."""
    family, member = divmod(number, FAMILY)
    shared = np.random.default_rng([seed, family]).random(len(FEATURES))
    own = np.random.default_rng([seed, family, member]).random(len(FEATURES))
    fell = {
        name: _chosen(values, own[i] if name in CHANGING else shared[i])
        for i, (name, values) in enumerate(FEATURES.items())
    }
    fell |= _taken(fell)
    return Draw(seed, number, fell if fell["as it fell"] == "yes" else settled(fell))


def _chosen(values: dict[Value, float], chance: float) -> Value:
    limits = np.cumsum(list(values.values()))
    return list(values)[int(np.searchsorted(limits, chance * limits[-1], side="right"))]


def settled(fell: dict[str, Value]) -> dict[str, Value]:
    """Returns a draw without what is known not to go together."""
    d = dict(fell)
    for rule in (_method, _options, _aggregator, _cohort, _protection, _server, _systems, _places):
        d |= rule(d)
    return d


def _method(d: dict[str, Value]) -> dict[str, Value]:
    name = d["algorithm"]
    if name in OWN_PEFT:
        model = "two" if name in ("fedmcp", "fedmatch") else d["model"]
        return {"peft": OWN_PEFT[name], "model": model}
    if name in NEED_LORA and d["peft"] not in LORA:
        return {"peft": "lora"}
    if d["model"] == "net" and d["peft"] in OF_TEXTS:
        return {"peft": "ia3" if d["peft"] == "ia3" else "lora"}
    return {"peft": "lora"} if d["model"] == "int8" and d["peft"] == "full" else {}


def _taken(d: dict[str, Value]) -> dict[str, Value]:
    """Returns None for the arguments that an algorithm does not have."""
    takes = inspect.signature(getattr(fp.algorithms, str(d["algorithm"]))).parameters
    arguments = {"head": "head", "space": "space", "weighting": "weights"}
    arguments |= {"server_schedule": "server_schedule", "aggregator": "aggregator"}
    return {feature: None for feature, name in arguments.items() if name not in takes}


def _options(d: dict[str, Value]) -> dict[str, Value]:
    name = d["algorithm"]
    out: dict[str, Value] = {}
    if name in HEADS and d["head"] is not None:
        out["head"] = HEADS[name]
    if d["peft"] == "head_only":
        out["head"] = None
    refuse = (*STAGED, *TURNS, *RELAYED, "fednova", "fedrot", "fedsvd", "ravan", "scaffold", "ifca")
    refuse = (*refuse, "fedlease")
    if name in (*refuse, *ZEROTH, *DRAWING, "fedask") or (
        d["aggregator"] and _stem(d["aggregator"]) in FACTORING
    ):
        out["keep_optimizer"] = "no"
    if name not in OWN_OPTIONS:
        out["own option"] = "none"
    if name == "scaffold":
        out["optimizer"] = "sgd"
    if name in ("fednova", "feddyn") and d["optimizer"] in ("adam", "adamw", "momentum"):
        out["optimizer"] = "sgd"
    return out


def _aggregator(d: dict[str, Value]) -> dict[str, Value]:
    name, aggregator = d["algorithm"], d["aggregator"]
    of_factors = aggregator and (_stem(aggregator) in FACTORING or "product" in aggregator)
    plain = d["peft"] in LORA and name not in ("ffa", "fedsa", *TURNS, "scaffold", "fedsvd")
    out: dict[str, Value] = {}
    if of_factors and not plain:
        out["aggregator"] = "mean()" if _stem(aggregator) in FACTORING else "median()"
    if d["space"] == "product" and (not plain or not of_factors):
        out["space"] = None
    adaptive = ("fedadagrad", "fedadam", "fedavgm", "fedyogi")
    if name in adaptive and of_factors and plain and "product" not in str(aggregator):
        out["space"] = "product"
    if aggregator in ("krum(1)", "multi_krum(1)"):  # of five clients at least
        out |= {"clients": "five", "sampling": "all"}
    if name == "slora" and aggregator:
        out["aggregator"] = None
    return out


def _cohort(d: dict[str, Value]) -> dict[str, Value]:
    if d["algorithm"] == "centralised":
        return {"clients": "one", "weights": None, "sampling": "all", "cohort": "not given"}
    if d["sampling"] == "all":
        return {"cohort": "not given"}
    if d["sampling"] != "uniform" and d["cohort"] == "not given":
        return {"cohort": "two"}
    return {}


def _protection(d: dict[str, Value]) -> dict[str, Value]:
    name, aggregator, private = d["algorithm"], d["aggregator"], d["privacy"]
    out: dict[str, Value] = {}
    if name in ("local", "centralised") or (d["attack"] and private):
        out["attack"] = None
    if d["model"] == "net" and d["attack"] and _stem(d["attack"]) == "backdoor":
        out["attack"] = "label_flip(0.4)"
    if d["attack"] and aggregator == "fltrust(0)":  # client 0 may be hostile
        out["attack"] = None
    if not private:
        return out
    out["availability"] = None
    of_examples = _stem(private) == "example"
    hindered = (
        (*ZEROTH, *OF_LOSSES, "ifca", "feddpa_f", "feddpa_t", "fedmcp", "fra_ffa")
        if of_examples
        else (
            *RELAYED,
            *OF_LOSSES,
            *ROWS,
            "fedlease",
            "fedmezo",
            "fedask",
            "fedplora",
            "fra_ffa",
            "hilora",
            "slora",
            "local",
            "centralised",
            "fedalt",
        )
    )
    if name in hindered:
        return out | {"privacy": None}
    if not of_examples:
        out["weighting"] = None if d["weighting"] is None else "uniform"
        if aggregator and _stem(aggregator) not in ("mean", "fra", "flexlora"):
            out["aggregator"] = "mean()"
    if not of_examples and _stem(private) != "paper_noise":
        out["client_ranks"] = None
        if d["sampling"] not in ("poisson", "uniform"):
            out |= {"sampling": "poisson", "cohort": "two"}
    if _stem(private) == "distributed":
        out["sampling"] = "uniform"
    if _stem(private) == "correlated":
        out |= {"sampling": "round_robin", "rounds": 3, "cohort": "two"}
        if d["clients"] == "five":
            out["clients"] = "four"
    if of_examples:
        out["batch_sampling"] = "poisson"
        if name == "fedrep":
            out["own option"] = "none"
    return out


def _server(d: dict[str, Value]) -> dict[str, Value]:
    name, aggregator = d["algorithm"], d["aggregator"]
    out: dict[str, Value] = {}
    factoring = bool(aggregator and (_stem(aggregator) in FACTORING or "product" in aggregator))
    if d["asynchronous"]:
        late = (*RELAYED, *STAGED, *TURNS, "fedalt", "feddyn", "fednova", "fedsvd", "scaffold")
        late = (*late, "fedask", "fedlease", "fedplora")
        if (
            name in (*late, *ZEROTH, *OF_LOSSES, *ROWS, "local", "centralised")
            or factoring
            or d["privacy"]
        ):
            out["asynchronous"] = None
        else:
            out |= {"sampling": "uniform", "deadline": None, "space": None}
            if d["clients"] == "one":
                out["clients"] = "two"
            if d["cohort"] == "one":
                out["cohort"] = "two"
    down = (
        *OF_LOSSES,
        *ROWS,
        "fedalt",
        "fedlease",
        "fedplora",
        "fednova",
        "fedsvd",
        "ravan",
        "scaffold",
        *RELAYED,
        *STAGED,
    )
    if str(d["second transform"]).startswith("downlink") and name in (*down, "local"):
        out["second transform"] = None
    if name in (*ZEROTH, "flora", "fedask", "local", "centralised"):
        out |= {"transform": None, "second transform": None}
    if name == "hetlora" and d["own option"] == "first":
        out |= {"transform": None, "second transform": None, "keep_optimizer": "no"}
    return out


def _systems(d: dict[str, Value]) -> dict[str, Value]:
    out: dict[str, Value] = {}
    unable = ("fedex", "fedmomentum", "hilora", "fedsb", "ravan", "slora", "feddpa_f", "feddpa_t")
    unable = (*unable, *ZEROTH, *DRAWING)
    if d["client_ranks"]:
        cannot = d["peft"] in ("lora_1", "lora_svd", "dora") or d["algorithm"] in unable
        others = d["aggregator"] and _stem(d["aggregator"]) in (*ROBUST, "lora_fair")
        if cannot or others or not str(d["peft"]).__contains__("lora") or d["attack"]:
            out["client_ranks"] = None
        if d["clients"] in ("one", "two") and d["client_ranks"] != "1,":
            out["client_ranks"] = "1,"
    if "(" not in str(d["work"]):
        out["stragglers"] = "no"
    if d["deadline"] is None:
        out["late"] = "drop"
    return out


def _places(d: dict[str, Value]) -> dict[str, Value]:
    out: dict[str, Value] = {}
    if d["model"] == "net" or d["peft"] in ("full", "prefix", "layer_norm", "bitfit"):
        out["other reuse"] = "none"
    if d["nan client"] == "yes" and (d["model"] != "net" or d["clients"] == "one"):
        out["nan client"] = "no"
    if "local" in str(d["diagnostics"]) and d["test"] not in ("global", "both"):
        out["test"] = "global"
    if d["diagnostics"] and "cka" in str(d["diagnostics"]) and d["model"] == "net":
        out["diagnostics"] = "variation"
    return out


def _stem(text: Value) -> str:
    return str(text).partition("(")[0]
