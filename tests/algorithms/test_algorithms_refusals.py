"""Options and models that do not fit are refused with the name and the remedy."""

import optax
import pytest
import toy
import toy_cores
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import algorithms as a

SGD = optax.sgd(0.1)
THREE_STAGES = {"clients": 5, "root_rounds": 1, "cluster_rounds": 1}
LEASE = {"clients": 5}
SCHEDULED = fp.schedules.scheduled(SGD, fp.schedules.constant())
TOGETHER = [
    (
        a.fedopt,
        {"server": SCHEDULED, "server_schedule": fp.schedules.constant()},
        "has a schedule already",
    ),
    (a.hierfavg, {"edges": (0, 2, 2)}, "Edge 1 of hierfavg has no clients"),
    (
        a.gossip,
        {"clients": 5, "graph": [(0, 1), (2, 3), (3, 4)]},
        r"not connected: client 0 never hears of the clients 2, 3, 4.*Add pairs",
    ),
    (a.gossip, {"clients": 30, "graph": "random", "degree": 1}, "Set degree above 1"),
    (a.gossip, {"clients": 7, "graph": "torus"}, "7 clients do not make a torus"),
    (a.gossip, {"clients": 3, "graph": [(0, 3)]}, r"clients from 0 to 2, and one is \[0, 3\]"),
    (a.hetlora, {"penalty": 1.0}, "set prune too"),
    (
        a.hilora,
        THREE_STAGES | {"fewest_clusters": 3, "most_clusters": 2},
        "at most most_clusters = 2",
    ),
    (a.hilora, THREE_STAGES | {"fewest_clusters": 6}, "at most the number of clients, 5"),
]


@pytest.mark.parametrize(
    ("make", "options", "message"), TOGETHER, ids=lambda x: getattr(x, "__name__", "")
)
def test_options_that_do_not_fit_together_are_refused(make, options, message):
    refused(message, make, SGD, **options)


LORA, DUAL, SUM = toy.KINDS, toy.dual_model().kinds, toy.sum_model().kinds
EXPERTS = toy.experts_model().kinds
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
    (a.fedlease, LEASE, LORA, 5, r"attach fp\.peft\.lora_experts\(experts=4\)"),
    (a.fedlease, LEASE | {"max_experts": 3}, EXPERTS, 5, "4 experts.*: set max_experts = 4"),
    (a.fedlease, LEASE, EXPERTS, 6, "which has 6: set clients = 6"),
    (a.feddpa_t, {}, LORA, 4, r"fp\.peft\.dual_lora\(\)"),
    (a.fedsb, {}, LORA, 4, r"fp\.peft\.lora_sb\(\)"),
    (a.ravan, {}, LORA, 4, r"fp\.peft\.ravan\(\)"),
    (a.slora, {"sparse_rounds": 1}, LORA, 4, r"fp\.peft\.slora\(\)"),
    (a.pfedlora, {}, LORA, 4, r"attach peft.lora_with_base\(\)"),
    (a.hilora, THREE_STAGES, LORA, 5, r"fp\.peft\.lora_sum\(\)"),
    (a.afl, {"clients": 5}, LORA, 6, "which has 6: set clients = 6"),
    (a.gossip, {"clients": 5}, LORA, 6, "which has 6: set clients = 6"),
    (a.ifca, {"clusters": 6}, LORA, 5, "clusters = 6 of ifca must be at most.* 5"),
    (a.hierfavg, {"edges": 6}, LORA, 5, "edge 5 has no clients: set edges to at most 5"),
    (a.hierfavg, {"edges": (0, 1)}, LORA, 5, "the edge of 2 clients, and the federation has 5"),
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
    a.fedlease(SGD, **LEASE).check(EXPERTS, 5)
    a.feddpa_t(SGD).check(toy_cores.pair_model().kinds, 4)
    a.hetlora(fp.optimizers.kept(SGD)).check(LORA, 4)
