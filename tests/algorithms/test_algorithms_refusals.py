"""Options out of range, and models that do not fit, are refused with the name and the remedy."""

import optax
import pytest
import toy
import toy_cores

import fedjax_peft as fp
from fedjax_peft import algorithms as a

SGD = optax.sgd(0.1)
THREE_STAGES = {"clients": 5, "root_rounds": 1, "cluster_rounds": 1}
SCHEDULED = fp.schedules.scheduled(SGD, fp.schedules.constant())
OPTIONS = [
    (a.apfl, {"alpha": 1.5}, "alpha = 1.5"),
    (a.ditto, {"lam": -1}, "lam = -1"),
    (a.fedadagrad, {"tau": 0.0}, "tau"),
    (a.fedadagrad, {"start": -1.0}, "start"),
    (a.fedadam, {"b1": 1.0}, "b1"),
    (a.fedadam, {"server_schedule": 0.5}, "'server_schedule' of 'fedadam'"),
    (a.fedavgm, {"momentum": -0.1}, "momentum"),
    (a.fedbabu, {"head": "private"}, "'fedbabu' must be 'frozen'.* there is 'fedper'"),
    (a.feddpa_f, {"tune_epochs": -1}, "tune_epochs"),
    (a.feddpa_t, {"mix": 0.0}, "mix"),
    (a.feddpa_t, {"mix": 1.0}, "mix"),
    (a.feddpa_t, {"max_weight": 0.0}, "max_weight"),
    (a.feddyn, {"alpha": 0.0}, "alpha"),
    (a.fedmcp, {"gamma": 1.0}, "gamma"),
    (a.fedmcp, {"mu": -1}, "mu"),
    (a.fedmcp, {"similarity": "cca"}, "'cka'"),
    (a.fedmcp, {"pooling": "max"}, "cls, mean"),
    (a.fedmcp, {"pooling": "last"}, r"pooling = 'last'.*mean"),
    (a.fedmcp, {"private_rep": "both"}, "dual, private_only"),
    (a.fedmomentum, {"energy": 0.0}, "energy = 0.0 must be a number above 0"),
    (a.fedmomentum, {"energy": 1.1}, "energy = 1.1 must be"),
    (
        a.fedopt,
        {"server": SCHEDULED, "server_schedule": fp.schedules.constant()},
        "has a schedule already",
    ),
    (a.fedper, {"head": "shared"}, "'fedper' must be 'private'.* there is 'fedavg'"),
    (a.fedprox, {"mu": -0.1}, "mu"),
    (a.fedrep, {"head": "shared"}, "'fedrep' must be 'private', not 'shared'"),
    (a.fedrep, {"head": "frozen"}, "there is 'fedbabu'"),
    (a.fedrep, {"head_epochs": 0}, "head_epochs = 0"),
    (a.fedrep, {"body_epochs": 1.5}, "body_epochs = 1.5"),
    (a.fedrep, {"tune_epochs": -1}, "tune_epochs = -1"),
    (a.fedrot, {"strength": 1.5}, "strength = 1.5 must be a number from 0 to 1"),
    (a.fedrot, {"strength": -0.1}, "strength = -0.1 must be"),
    (a.fedrot, {"first": "C"}, "first = 'C' is not one of A, B"),
    *((a.fedsvd, {"period": period}, "period") for period in (0, -1, 1.5)),
    (a.fedyogi, {"b2": float("nan")}, "b2"),
    (a.fra_ffa, {"trigger": "loss"}, "trigger = 'loss'"),
    (a.fra_ffa, {"at": 0}, "at = 0"),
    (a.fra_ffa, {"patience": 0}, "patience = 0"),
    (a.fra_ffa, {"tolerance": -0.1}, "tolerance = -0.1"),
    (a.fra_ffa, {"rank": 0}, "at least 1, not 0"),
    (a.hetlora, {"prune": 1.5}, "prune = 1.5"),
    (a.hetlora, {"prune": 0.5, "penalty": -1.0}, "penalty = -1.0"),
    (a.hetlora, {"penalty": 1.0}, "set prune too"),
    (a.hetlora, {"prune": 0.5, "keep_optimizer": True}, "moments of earlier rounds would move dir"),
    (a.hilora, THREE_STAGES | {"clients": 0}, "clients = 0"),
    (a.hilora, THREE_STAGES | {"root_rounds": 0}, "root_rounds = 0"),
    (a.hilora, THREE_STAGES | {"cluster_rounds": 0}, "cluster_rounds = 0"),
    (a.hilora, THREE_STAGES | {"root_penalty": -1.0}, r"root_penalty = -1\.0"),
    (a.hilora, THREE_STAGES | {"cluster_penalty": -1.0}, r"cluster_penalty = -1\.0"),
    (a.hilora, THREE_STAGES | {"decay": 1.0}, r"decay = 1\.0"),
    (a.hilora, THREE_STAGES | {"fewest_clusters": 0}, "fewest_clusters = 0"),
    (
        a.hilora,
        THREE_STAGES | {"fewest_clusters": 3, "most_clusters": 2},
        "at most most_clusters = 2",
    ),
    (a.hilora, THREE_STAGES | {"fewest_clusters": 6}, "at most the number of clients, 5"),
    (a.lora_a2, {"budget": 0}, "budget = 0 must be a whole number from 1"),
    (a.lora_a2, {"budget": [2, 1.5]}, "budget = 1.5 must be a whole number"),
    (a.lora_a2, {"budget": []}, r"budget = \[\] has no entry"),
    (a.lora_a2, {"rate_ratio": 0.0}, "rate_ratio = 0.0 must be a positive"),
    (a.moon, {"temperature": 0}, "temperature = 0"),
    (a.moon, {"mu": -0.1}, "mu = -0.1"),
    (a.moon, {"pooling": "last"}, r"pooling = 'last'.*mean"),
    (a.pfedlora, {"model_epochs": 0}, "model_epochs = 0 must be a whole number"),
    (a.pfedme, {"inner_steps": 0}, "inner_steps = 0"),
    (a.pfedme, {"lam": float("nan")}, "lam = nan"),
    (a.scaffold, {"learning_rate": 0.0}, "learning_rate"),
    (a.scaffold, {"learning_rate": 0.5, "server_learning_rate": -1.0}, "server_learning"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), OPTIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_options_out_of_range_are_refused(make, options, message):
    with pytest.raises(fp.InputError, match=message):
        make(SGD, **options)


LORA, DUAL, SUM = toy.KINDS, toy.dual_model().kinds, toy.sum_model().kinds
NO_LORA = {n: kind for n, kind in LORA.items() if "lora" not in n}
NO_PRIVATE = {n: kind for n, kind in DUAL.items() if "private" not in n}
ONE_HEAD = {n: kind for n, kind in DUAL.items() if "second" not in n}
DORA = {**LORA, "layer.lora_magnitude": "adapter"}
OF_LORA = (
    *(a.fedex, a.fedmomentum, a.fedrot, a.fedsa, a.ffa, a.flora, a.fra_ffa, a.hetlora),
    *(a.lora_a2, a.rolora),
)
MODELS = [
    *((make, {}, NO_LORA, 4, rf"'{make.__name__}' .* LoRA") for make in OF_LORA),
    *((make, {}, DORA, 4, "lora_magnitude") for make in (a.flora, a.fedex)),
    *((make, {}, NO_PRIVATE, 3, r"attach peft\.dual\(\)") for make in (a.fedmcp, a.fedmatch)),
    (a.fedmcp, {}, ONE_HEAD, 3, r"two_classifiers.*gamma = 0"),
    (a.centralised, {}, LORA, 5, r"5 clients.*partition\.pooled"),
    (a.fedalt, {}, LORA, 4, "attach peft.mixed_lora"),
    (a.feddpa_t, {}, LORA, 4, r"fp\.peft\.dual_lora\(\)"),
    (a.fedsb, {}, LORA, 4, r"fp\.peft\.lora_sb\(\)"),
    (a.ravan, {}, LORA, 4, r"fp\.peft\.ravan\(\)"),
    (a.slora, {"sparse_rounds": 1}, LORA, 4, r"fp\.peft\.slora\(\)"),
    (a.pfedlora, {}, LORA, 4, r"attach peft.lora_with_base\(\)"),
    (a.hilora, THREE_STAGES, LORA, 5, r"fp\.peft\.lora_sum\(\)"),
    (a.hilora, THREE_STAGES, SUM, 6, "which has 6: set clients = 6"),
]


@pytest.mark.parametrize(
    ("make", "options", "kinds", "clients", "message"),
    MODELS,
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_models_and_clients_that_do_not_fit_are_refused(make, options, kinds, clients, message):
    with pytest.raises(fp.InputError, match=message):
        make(SGD, **options).check(kinds, clients)


def test_what_fits_is_accepted():
    """The refusals above are due to one option or leaf."""
    a.fedmcp(SGD, gamma=0).check(ONE_HEAD, 3)
    a.fedmcp(SGD).check(DUAL, 3)
    a.hilora(SGD, **THREE_STAGES).check(SUM, 5)
    a.feddpa_t(SGD).check(toy_cores.pair_model().kinds, 4)
    a.hetlora(SGD, keep_optimizer=True).check(LORA, 4)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (a.apfl, {"alpha": 0.0}),
        (a.apfl, {"alpha": 1.0}),
        (a.ditto, {"lam": 0.0}),
        (a.fedmcp, {"mu": 0.0}),
        (a.fedmomentum, {"energy": 1.0}),
        (a.fedprox, {"mu": 0.0}),
        (a.fedrot, {"strength": 0.0}),
        (a.fedrot, {"strength": 1.0}),
        (a.fra_ffa, {"tolerance": 0.0}),
        (a.hetlora, {"prune": 0.5, "penalty": 0.0}),
        (a.moon, {"mu": 0.0}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_ends_of_a_range_are_accepted(make, options):
    make(SGD, **options)
