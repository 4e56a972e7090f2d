"""Settings of a config that are run-time values of the compiled program."""

import pytest
from small_config import small

from fedjax_peft.config import config as configs
from fedjax_peft.config import running


@pytest.mark.parametrize("schedule", [{}, {"schedule": {"name": "cosine"}}])
def test_an_algorithm_of_swept_rates_reads_the_schedule(schedule):
    rates = {"optimizer": {"learning_rate": 0.1}, "runtime": ["optimizer.learning_rate"]}
    raw = small(rounds=7, model="minilm-l6", data="rte", **rates)
    made = running.made_from_values(configs.resolve(raw | schedule))
    assert made["values"] == {"optimizer.learning_rate": 0.1}
    assert made["algorithm"](made["values"]).name == "fedavg"
    again = running.made_from_values(configs.resolve({**raw, **schedule, "rounds": 9}))
    assert (again["algorithm"] == made["algorithm"]) == (not schedule), "a schedule has the rounds"
