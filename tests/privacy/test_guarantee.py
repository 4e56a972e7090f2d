"""The guarantee in the rows of a run, in its report, and what breaks it."""

import math
import shutil
import warnings

import documented_fields
import linear
import pytest
import running
import toy
import toy_transforms
from closeness import approx
from internals import (
    Accounted,
    accounting,
    guarantees,
    load_run,
    privacy_in_words,
    read_metrics,
    tells_clients,
    watched,
    write_report,
)
from refusals import refused

import fedjax_peft as fp
from fedjax_peft import InputError, early_stop
from fedjax_peft.privacy import statements

pytestmark = pytest.mark.slow

DELTA = 1e-5
MODEL = linear.model()


def fake(noise_multiplier=2.0) -> fp.contracts.Privacy:
    """Returns an accountant without a mechanism: only the guarantee is of interest here."""
    return fp.contracts.Privacy(
        "fake",
        "client",
        lambda algorithm, federation: algorithm,
        lambda federation, rounds: guarantees.client_guarantee(
            noise_multiplier, DELTA, federation, rounds
        ),
        statements.composition_in_words,
    )


FAKE = fake()


def simulate(privacy, **options):
    given = {"model": MODEL, "sampling": "poisson", "clients_per_round": 2}
    return running.run(**{**given, "privacy": privacy, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return simulate(FAKE, out=tmp_path_factory.mktemp("runs") / "run")


def test_each_row_has_the_guarantee_so_far(run):
    def epsilon(rounds):
        return accounting.epsilon(accounting.gaussian_event(2.0, rounds, 0.4), DELTA)

    rows = read_metrics(run.out / "metrics.jsonl")
    assert [row["epsilon"] for row in rows] == approx([0, epsilon(1), epsilon(2)])
    assert [row["delta"] for row in rows] == [DELTA] * 3
    described = run.metrics[0]["privacy"]
    assert (described["name"], described["unit"]) == ("fake", "client")
    assert "add or remove one" in described["statement"]
    assert "privacy" not in run.metrics[1]
    names = {name for row in run.metrics for name in documented_fields.field_names(row)}
    assert {name for name in names if documented_fields.find(name) is None} == set(), (
        "all fields are documented"
    )


def test_a_run_says_its_guarantee(run):
    words = privacy_in_words(run.metrics)
    epsilon = run.metrics[-1]["epsilon"]
    assert words.startswith(f"({epsilon:.4g}, 1e-05)-differential privacy of each client. fake: It")
    assert run.privacy == words


def test_the_report_has_a_column_and_the_statement(run, tmp_path):
    page = write_report([load_run(run.out)], tmp_path).read_text()
    assert "Privacy (ε, δ)" in page
    assert "differential privacy of each client. fake: It compares federations" in page
    header, cells = (tmp_path / "table.csv").read_text().splitlines()[:2]
    values = dict(zip(header.split(","), cells.split(","), strict=False))
    assert float(values["epsilon"]) == approx(run.metrics[-1]["epsilon"])


def test_the_banner_promises_the_guarantee_of_all_rounds():
    promised = []
    simulate(FAKE, on_phase=lambda p: promised.append(p.details.get("privacy")), rounds=2)
    total = accounting.epsilon(accounting.gaussian_event(2.0, 2, 0.4), DELTA)
    assert promised[0].startswith(f"({total:.4g}, 1e-05)-differential privacy")


def test_no_guarantee_is_null_and_said(tmp_path):
    found = simulate(fake(0.0), rounds=1, out=tmp_path / "run")
    assert [row["epsilon"] for row in found.metrics] == [0.0, None]
    assert found.privacy.startswith("no guarantee of differential privacy. fake:")
    page = write_report([load_run(tmp_path / "run")], tmp_path / "report").read_text()
    assert "no guarantee of differential privacy" in page


def test_run_time_values_are_accounted_for_by_their_numbers():
    found = simulate(lambda p: fake(p["z"]), values={"z": 3.0}, rounds=1)
    expected = accounting.epsilon(accounting.gaussian_event(3.0, 1, 0.4), DELTA)
    assert found.metrics[1]["epsilon"] == approx(expected)
    assert math.isfinite(expected)


def test_a_run_without_a_mechanism_has_no_guarantee():
    found = simulate(None, rounds=1)
    assert not any({"epsilon", "delta", "privacy"} & row.keys() for row in found.metrics)
    assert found.privacy == ""


def test_a_run_is_not_resumed_with_other_noise(run, tmp_path):
    shutil.copytree(run.out, tmp_path / "run")
    again = {"out": tmp_path / "run", "resume": True, "rounds": 3}
    refused("was run with another config: privacy", simulate, fake(3.0), **again)
    assert simulate(FAKE, **again).metrics[-1]["epsilon"] > run.metrics[-1]["epsilon"]


def test_an_error_that_names_one_client_is_refused():
    refused("nonfinite='raise' would tell everyone", simulate, FAKE, nonfinite="raise")


def test_a_transform_that_gives_away_what_it_measured_is_refused():
    one, clip = toy_transforms.feedback(), fp.transforms.clip_norm(1.0)
    with pytest.raises(
        InputError, match="'feedback' changes the sum, and may use what it measured"
    ):
        simulate(FAKE, transforms=one)
    adaptive = fp.transforms.chain(clip, one._replace(changes_aggregate=False))
    refused("'feedback' has a state that is sent", simulate, FAKE, transforms=[clip, adaptive])
    # One of these has a state and the other a part at the server, and none has both.
    apart = fp.transforms.chain(one._replace(server=None), clip)
    assert tells_clients(apart, apart.init(MODEL.trainable)) is None
    simulate(FAKE, transforms=clip, rounds=1)


@pytest.mark.parametrize("topology", ["serial", "shared"])
def test_a_deadline_that_one_client_can_make_others_miss_is_refused(topology):
    link = 1e6 if topology == "shared" else None
    time = fp.TimeModel(topology=topology, server_bandwidth=link)
    refused("use topology = 'parallel'", simulate, FAKE, deadline=9.0, time_model=time)


def test_measurements_of_single_clients_are_warned_of():
    with pytest.warns(UserWarning, match="measurements of single clients") as caught:
        simulate(FAKE, diagnostics=["clients"], rounds=1)
    assert len(caught) == 1


def test_a_stop_rule_on_training_data_is_warned_of_once():
    with pytest.warns(UserWarning, match=r"stop rule reads \['train_loss'\]") as caught:
        simulate(FAKE, stop=early_stop(metric="train_loss", patience=9), rounds=3)
    assert len(caught) == 1


ROW = dict.fromkeys(("round", "epsilon", "train_loss", "update_norm", "bytes_up"), 1.0)
ROW |= {"simulated_seconds": 3.0, "clients": [1], "time": {"train_s": 1.0}, "test_loss": 1.0}
ROW |= {"validation_loss": 1.0, "global_test_loss": 1.0, "client_loss_mean": 1.0}
SECRET = {"train_loss", "update_norm", "clients", "client_loss_mean"}
COSTS = {"bytes_up", "simulated_seconds", "time"}


@pytest.mark.parametrize(
    ("unit", "personal", "secret"),
    [
        ("client", False, SECRET | COSTS),
        ("client", True, SECRET | COSTS | {"test_loss", "validation_loss"}),
        ("example", True, SECRET),
    ],
)
def test_a_stop_rule_is_warned_of_all_that_the_guarantee_does_not_cover(unit, personal, secret):
    private = Accounted(FAKE._replace(unit=unit), None, personal)
    ways = [
        lambda row, name: row[name],
        lambda row, name: row.get(name),
        lambda row, name: {**row}[name],
        lambda row, name: dict(row.items())[name],
        lambda row, name: dict(zip(row, row.values(), strict=True))[name],
        lambda row, name: (row | {"other": 0.0})[name],
        lambda row, name: row.copy()[name],
    ]
    for name in ROW:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watched(lambda rows, n=name: ways[0](rows[0], n) and None, private)([ROW, ROW])
        assert bool(caught) == (name in secret), name
    advice = r"\(global_test_\.\.\." if personal else r"\(test_\.\.\."
    for read in ways[1:]:
        with pytest.warns(UserWarning, match=f"train_loss.*{advice}"):
            watched(lambda rows, way=read: bool(way(rows[-1], "train_loss")), private)([ROW])


def test_personal_models_under_client_privacy_have_no_public_test_score():
    personal = running.FEDAVG._replace(personal=True)
    options = {"model": MODEL, "test": toy.clients((6,)).data, "privacy": FAKE}
    with pytest.warns(UserWarning, match=r"reads \['test_loss'\].*global_test_"):
        running.run(personal, stop=early_stop(metric="test_loss", patience=9), **options)
    running.run(personal, stop=early_stop(metric="global_test_loss", patience=9), **options)


def test_a_stop_rule_on_a_public_test_set_is_fine():
    examples = toy.clients((6,)).data
    simulate(FAKE, stop=early_stop(target=2.0), test=examples, rounds=2)
