"""Numbers that no mechanism can have are refused where it is made, by the name of the argument."""

import math

import pytest

from fedjax_peft import InputError, privacy


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        *(
            (name, options, words)
            for name in ("central", "adaptive", "local", "example")
            for options, words in [
                ({"clip": 0.0}, "clip"),
                ({"noise_multiplier": -1.0}, "noise_multiplier"),
                ({"delta": 0.0}, "delta"),
            ]
        ),
        ("central", {"delta": True}, "delta"),
        ("local", {"delta": 1.0}, "delta"),
        ("adaptive", {"count_noise": 0.5}, "use up the whole guarantee"),
        ("adaptive", {"quantile": 1.5}, "quantile"),
        ("adaptive", {"clip_rate": 0.0}, "clip_rate"),
        ("distributed", {"noise_multiplier": 0.0}, "noise_multiplier"),
        ("distributed", {"bits": 3}, "bits = 3"),
        ("distributed", {"bits": 32}, "bits = 32"),
        ("distributed", {"dropouts": 1.0}, "dropouts"),
        ("example", {"clip": math.inf}, "clip = inf"),
        ("example", {"clip": "1"}, "clip = '1'"),
        ("example", {"noise_multiplier": math.nan}, "noise_multiplier = nan"),
        ("example", {"microbatch": 0}, "microbatch = 0"),
        ("example", {"accountant": "moments"}, "accountant"),
    ],
)
def test_numbers_that_are_not_possible_are_refused(name, options, words):
    with pytest.raises(InputError, match=words):
        getattr(privacy, name)(**{"clip": 1.0, "noise_multiplier": 1.0, **options})


def test_an_unknown_kind_of_noise_is_refused():
    with pytest.raises(InputError, match="gaussian"):
        privacy.paper_noise(1.0, "gausian")
