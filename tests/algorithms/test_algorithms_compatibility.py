"""What every algorithm can and cannot be combined with, as one table."""

import re

import pytest
from internals import check_method, check_transforms
from test_algorithms_all import (
    NAMES,
    OF_LOSSES,
    ROWS,
    SGD,
    ZEROTH,
    clients_of,
    facts,
    make,
    model_of,
)
from toy_transforms import feedback

import fedjax_peft as fp
from fedjax_peft import aggregators, asynchronous, attacks, privacy, transforms

RELAYED = ("fedex", "fedmomentum", "flora")
SINGLE = (
    *("fedavg_flora_na", "fedavg_geometric_median_product", "fedavg_median", "fedavg_raflora"),
)
PRODUCTS = ("fedavg_flexlora", "fedavg_fra", "fedavg_ilora", "fedavgm_product")
STAGED = ("fra_ffa", "fra_ffa_plateau", "hilora", "slora")
TURNS = ("lora_a2", "lora_a2_one", "rolora")

REFUSED = {
    fp.contracts.Feature.TRANSFORMS: (*ZEROTH, "fedask", "flora", "hetlora_prunes"),
    fp.contracts.Feature.SERVER_TRANSFORMS: (
        *(*RELAYED, *SINGLE, *PRODUCTS, "fedavg_hetlora", "fedavg_lora_fair", "fedmezo"),
        *(*OF_LOSSES, *ROWS),
        *("fra_ffa", "fra_ffa_plateau", "hetlora", "hetlora_prunes", "hilora"),
        *("fedask", "fedplora"),
    ),
    fp.contracts.Feature.DOWNLINK: (
        *RELAYED,
        *STAGED,
        *ZEROTH,
        *OF_LOSSES,
        *ROWS,
        "fedalt",
        "fedplora",
        "fednova",
        "fedsvd",
        "ravan",
        "scaffold",
    ),
    fp.contracts.Feature.KEPT_OPTIMIZER: (
        *(*STAGED, *TURNS, *ZEROTH, "ifca", "fedmomentum", "fednova", "fedrot", "fedsvd", "flora"),
        *("hetlora_prunes", "ravan", "scaffold", "fedask", "fedlease", "fedplora", "fslora"),
    ),
    fp.contracts.Feature.NEW_FACTORS: (
        *(*TURNS, "apfl", "centralised", "ditto", "fedadagrad", "fedadam", "fedavgm", "fedopt"),
        *("fedavg_keeps_optimizer", "feddyn", "fedyogi", "scaffold", "slora"),
    ),
    fp.contracts.Feature.CLIENT_RANKS: (
        *(*ZEROTH, "fedavg_lora_fair", "fedex", "fedmomentum", "hilora"),
        *("fedplora", "fslora"),
    ),
    fp.contracts.Feature.CLIENT_PRIVACY: (
        *(*RELAYED, *SINGLE, *OF_LOSSES, *ROWS, "fedmezo", "fra_ffa_plateau", "hilora"),
        *("fedask", "fedplora"),
    ),
    fp.contracts.Feature.EXAMPLE_PRIVACY: (
        *(*ZEROTH, *OF_LOSSES, "ifca", "feddpa_f", "feddpa_t", "fedmcp", "fra_ffa_plateau"),
    ),
    fp.contracts.Feature.ATTACKS: ("local",),
    fp.contracts.Feature.ASYNCHRONY: (
        *(*RELAYED, *PRODUCTS, *STAGED, *TURNS, *ZEROTH, *OF_LOSSES, *ROWS, "fedalt"),
        *("fedavg_geometric_median_product", "fedavg_raflora"),
        *("feddyn", "fednova", "fedsvd", "hetlora_prunes", "scaffold", "fedask", "fedplora"),
    ),
}
"""Feature -> the algorithms that cannot be combined with it. All others can."""


def of_method(name, algorithm, ranks=None):
    """Checks an algorithm on its model and clients."""
    check_method(model_of(name), algorithm, len(clients_of(name)), ranks, ())


def with_new_factors(name, algorithm):
    """Checks an algorithm with an aggregator that factors anew."""
    of_method(name, algorithm._replace(aggregator=aggregators.fra()))


DOWN, KEPT = transforms.downlink(transforms.quantize(8)), fp.optimizers.kept(SGD)
USES = {
    fp.contracts.Feature.TRANSFORMS: lambda name, made: check_transforms(
        transforms.clip_norm(1.0), made
    ),
    fp.contracts.Feature.SERVER_TRANSFORMS: lambda name, made: check_transforms(feedback(), made),
    fp.contracts.Feature.DOWNLINK: lambda name, made: check_transforms(DOWN, made),
    fp.contracts.Feature.KEPT_OPTIMIZER: lambda name, made: make(name, KEPT),
    fp.contracts.Feature.NEW_FACTORS: with_new_factors,
    fp.contracts.Feature.CLIENT_RANKS: lambda name, made: of_method(name, made, [1]),
    fp.contracts.Feature.CLIENT_PRIVACY: lambda name, made: privacy.central(0.5, 0.5).protect(
        made, facts(name)
    ),
    fp.contracts.Feature.EXAMPLE_PRIVACY: lambda name, made: privacy.example(0.5, 0.5).protect(
        made, facts(name)
    ),
    fp.contracts.Feature.ATTACKS: lambda name, made: attacks.sign_flip(0.4).apply(
        made, facts(name)
    ),
    fp.contracts.Feature.ASYNCHRONY: lambda name, made: asynchronous.fedbuff(2).apply(
        made, facts(name)
    ),
}
"""Feature -> the function that refuses it, as a run calls it."""
OF_UPLOADS = (
    fp.contracts.Feature.SERVER_TRANSFORMS,
    fp.contracts.Feature.DOWNLINK,
    fp.contracts.Feature.ATTACKS,
)
"""Features that change what every upload transform changes."""


@pytest.mark.parametrize("feature", fp.contracts.Feature, ids=lambda feature: feature.name)
def test_the_table_says_what_each_algorithm_refuses(feature):
    found = {name for name in NAMES if feature in fp.contracts.refusals(make(name))}
    assert found == set(REFUSED[feature])


@pytest.mark.parametrize("feature", fp.contracts.Feature, ids=lambda feature: feature.name)
def test_a_run_refuses_what_the_algorithm_refuses_and_says_why(feature):
    for name in NAMES:
        made = make(name)
        reasons = fp.contracts.refusals(made)
        checked = (
            (fp.contracts.Feature.TRANSFORMS, feature) if feature in OF_UPLOADS else (feature,)
        )
        reason = next((reasons[one] for one in checked if one in reasons), None)
        if reason is None:
            USES[feature](name, made)
            continue
        assert reason[0].isupper()
        assert reason.endswith(".")
        message = f"{made.name!r} cannot be combined with .*{re.escape(reason)}"
        with pytest.raises(fp.InputError, match=message):
            USES[feature](name, made)


def test_where_the_aggregator_factors_anew_another_aggregator_is_advised():
    robust = aggregators.median(space="product")
    reason = fp.contracts.refusals(make("ditto", aggregator=robust))[
        fp.contracts.Feature.ASYNCHRONY
    ]
    assert "space = 'factors'" in reason
    assert "'ditto'" not in reason
    kept = fp.contracts.refusals(make("fedavgm_product", KEPT))
    assert "space at 'factors'" in kept[fp.contracts.Feature.NEW_FACTORS]


@pytest.mark.parametrize(
    ("name", "options", "refused"),
    [
        ("pfedme", {"beta": 0.5}, {fp.contracts.Feature.NEW_FACTORS}),
        ("pfedme", {"server_schedule": lambda t: 1 / t}, {fp.contracts.Feature.NEW_FACTORS}),
        ("ditto", {"lam": 0.0}, set()),
        ("fedmcp", {"similarity": "cosine"}, set()),
        ("fedmcp", {"mu": 0.0}, set()),
        ("fedrep", {"tune_epochs": 1}, {fp.contracts.Feature.EXAMPLE_PRIVACY}),
        ("feddpa_f", {"tune_epochs": 0}, set()),
    ],
)
def test_options_decide_what_is_refused(name, options, refused):
    assert fp.contracts.refusals(make(name, **options)).keys() == refused


@pytest.mark.parametrize("name", NAMES)
def test_algorithms_have_a_hash_by_which_programs_are_found_again(name):
    made = make(name)
    assert hash(made) == hash(made._replace(incompatible=dict(made.incompatible)))
