"""``fp.tune``: trials that run as points of a sweep, pruning, and continued searches."""

import itertools

import optax
import pytest
import toy
from closeness import assert_close
from compiled import compilations
from options import run_options
from refusals import refused
from running import CLIENTS

import fedjax_peft as fp
from fedjax_peft import InputError
from fedjax_peft.simulation.storage.lock import RunLock

optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")
pytestmark = pytest.mark.slow

GIVEN = {
    **{"rounds": 2, "clients_per_round": 3, "batch_size": 4, "local_steps": 2, "lanes": 1},
    "validation": toy.dataset(20, seed=6),
}
OPTIONS = {**run_options(**GIVEN), "choose_by": "validation_loss"}


@pytest.fixture(scope="module")
def model():
    return toy.model()


def make(p):
    return fp.algorithms.fedprox(optax.sgd(p["rate"]), mu=p["mu"])


def space(trial):
    return {"rate": trial.suggest_float("rate", 0.01, 0.5, log=True), "mu": 0.1}


class Second(optuna.pruners.BasePruner):
    """Gives up the second trial at its first evaluation."""

    def prune(self, study, trial):
        return trial.number == 1


def study(**options):
    usual = {"direction": "minimize", "sampler": optuna.samplers.RandomSampler(seed=0)}
    return optuna.create_study(**{**usual, "pruner": Second(), **options})


def states(tuned):
    return [trial.state.name for trial in tuned.study.trials]


@pytest.fixture(scope="module")
def alone(model):
    """Trials that run one after the other."""
    return fp.tune(model, make, CLIENTS, space=space, trials=4, batch=2, study=study(), **OPTIONS)


def test_trials_have_the_values_of_their_runs_and_pruners_stop_them(alone):
    assert states(alone) == ["COMPLETE", "PRUNED", "COMPLETE", "COMPLETE"]
    for trial in alone.study.trials:
        rows = alone.sweep.runs[trial.user_attrs["run"]].metrics
        # The value of the last round is that of the trial.
        assert trial.intermediate_values == {1: rows[1]["validation_loss"]}
        assert trial.value == rows[-1]["validation_loss"]
        assert alone.sweep.points[trial.user_attrs["run"]] == {"mu": 0.1, **trial.params}
        pruned = trial.state.name == "PRUNED"
        assert len(rows) == (2 if pruned else 3)
        assert (rows[-1].get("stopped") == "Optuna's pruner has given up trial 1") == pruned
    best = alone.sweep.best()
    assert best.settings["point.rate"] == alone.study.best_params["rate"]


def test_trials_of_a_batch_run_side_by_side_in_one_program(model, alone):
    options = {**OPTIONS, "space": space, "batch": 2, "replicas": 2}
    fp.tune(model, make, CLIENTS, trials=2, study=study(), **options)
    compilations.clear()
    together = fp.tune(model, make, CLIENTS, trials=4, study=study(), **options)
    assert compilations == []  # of two batches
    assert states(together) == states(alone)
    for one, other in zip(together.study.trials, alone.study.trials, strict=True):
        assert_close(one.value, other.value, rtol=1e-5, atol=0)


def test_a_search_continues_in_its_directory(model, tmp_path):
    """An interrupted trial is asked for again, and its run goes on."""
    options = {**OPTIONS, "space": space, "batch": 2, "out": tmp_path}

    def interrupt(row, seen=[]):  # noqa: B006 -- counts the calls
        seen.append(row["round"])
        if len(seen) == 6:
            raise KeyboardInterrupt

    records = fp.Records(on_round=interrupt, progress=False, checkpoint_every=1)
    with pytest.raises(KeyboardInterrupt):
        fp.tune(model, make, CLIENTS, trials=3, records=records, **options)
    rows, first = [], fp.Records(on_round=lambda row: rows.append(row["round"]), progress=False)
    tuned = fp.tune(model, make, CLIENTS, trials=3, records=first, **options)
    assert states(tuned) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert tuned.study.trials[1].params == tuned.study.trials[2].params
    assert rows == [2, 0, 1, 2]  # the interrupted run had made round 1
    names = {trial.user_attrs["run"] for trial in tuned.study.trials}
    assert {path.parent.name for path in tmp_path.glob("*/config.toml")} == names
    assert set(tuned.sweep.points) == names
    more = fp.tune(model, make, CLIENTS, trials=3, **options)
    assert (len(more.study.trials), more.sweep.runs) == (4, {})
    assert len(more.sweep.study.cells) == 3
    with RunLock.take(tmp_path), pytest.raises(InputError, match="in use by another run"):
        fp.tune(model, make, CLIENTS, trials=4, **options)  # it would fail the other's trials
    assert len(more.study.get_trials(deepcopy=False)) == 4


def test_several_processes_search_together(model, tmp_path):
    """Each has its own directory and leaves the trials of the others alone."""
    from optuna.storages.journal import JournalFileBackend

    seeds = itertools.count()

    def joined():
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "log")))
        own = {"sampler": optuna.samplers.RandomSampler(next(seeds)), "pruner": None}
        return study(storage=storage, study_name="one", load_if_exists=True, **own)

    other = joined().ask()  # of a process that is at work
    other.set_user_attr("out", str(tmp_path / "other"))
    other.suggest_float("rate", 0.01, 0.5, log=True)
    mine = {"study": joined(), "space": space, "out": tmp_path / "mine", **OPTIONS}
    tuned = fp.tune(model, make, CLIENTS, trials=3, **mine)
    assert [trial.state.name for trial in joined().trials] == ["RUNNING", "COMPLETE", "COMPLETE"]
    assert len(tuned.sweep.points) == 2
    joined().tell(other.number, 0.5)
    tuned = fp.tune(model, make, CLIENTS, trials=4, **{**mine, "study": joined()})
    assert states(tuned) == ["COMPLETE"] * 4
    assert len(list((tmp_path / "mine").glob("*/metrics.jsonl"))) == 3
    assert not (tmp_path / "other").exists()


def test_a_point_that_comes_again_is_not_run_again(model):
    def few(trial):
        return {"rate": trial.suggest_categorical("rate", [0.05]), "mu": 0.1}

    options = {**OPTIONS, "space": few, "trials": 3, "batch": 2, "seed": 3}
    tuned = fp.tune(model, make, CLIENTS, study=study(pruner=None), **options)
    assert states(tuned) == ["COMPLETE"] * 3
    assert len({trial.value for trial in tuned.study.trials}) == len(tuned.sweep.runs) == 1
    other = fp.tune(model, make, CLIENTS, study=study(), **options | {"trials": 1, "seed": 4})
    assert other.study.best_value != tuned.study.best_value, "the seed of all trials"
    again = fp.tune(model, make, CLIENTS, study=tuned.study, **options)  # its runs are nowhere
    assert (len(again.study.trials), again.sweep.runs, again.sweep.points) == (3, {}, {})


def test_a_trial_that_was_given_up_does_not_compete(model):
    """Its value is that of an earlier round, where a high rate may still be ahead."""
    rates = [0.5, 1e-3, 2e-3]

    def given(trial):
        rate = rates[trial.number] if hasattr(trial, "study") else trial.params["rate"]
        return {"rate": trial.suggest_float("rate", rate, rate), "mu": 0.1}

    class First(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 0

    options = {**OPTIONS, "space": given, "study": study(pruner=First())}
    tuned = fp.tune(model, make, CLIENTS, trials=3, **options)
    assert states(tuned) == ["PRUNED", "COMPLETE", "COMPLETE"]
    best, values = tuned.sweep.best(), [trial.value for trial in tuned.study.trials]
    assert min(values) == values[0]
    assert best.settings["point.rate"] == tuned.study.best_params["rate"] != rates[0]
    assert "1 of 3 runs were given up" in str(tuned.sweep.table())


def test_a_refused_point_is_a_trial_that_has_failed(model, tmp_path):
    """It counts, in this call and in later ones; where all fail, the fault may be the call's."""

    def clients(p):
        if p["rate"] == 7:
            raise InputError("7 is no rate.")
        return CLIENTS

    def three(trial):
        return {"rate": trial.suggest_categorical("rate", [0.05, 7.0, 0.1]), "mu": 0.1}

    options = {**OPTIONS, "space": three, "trials": 6, "batch": 3, "out": tmp_path}
    wrong = {**options, "space": lambda t: {"rate": 7.0, "mu": 0.1}, "trials": 1}
    with pytest.raises(InputError, match=r"1 of 1 point of the search failed.*7 is no rate"):
        fp.tune(model, make, clients, **wrong)
    with pytest.warns(UserWarning, match=r"1 of 3 points of the search failed.*7 is no rate"):
        tuned = fp.tune(model, make, clients, **options)
    assert len(tuned.study.trials) == 7
    assert {trial.state.name for trial in tuned.study.trials} == {"COMPLETE", "FAIL"}
    assert len(tuned.sweep.study.cells) == len(tuned.sweep.points) == 2
    again = fp.tune(model, make, clients, **options)
    assert (len(again.study.trials), again.sweep.runs) == (7, {})
    more = fp.tune(model, make, clients, **options | {"trials": 9})
    assert (len(more.study.trials), more.sweep.runs) == (10, {})


def test_a_search_of_another_space_or_in_an_odd_folder_is_refused(model, tmp_path):
    options = {**OPTIONS, "trials": 1, "out": tmp_path}
    fp.tune(model, make, CLIENTS, space=space, **options)

    def other(name="rate", low=0.01, suggest="suggest_float"):
        return lambda t: {"rate": getattr(t, suggest)(name, low, 1), "mu": 0.1}

    for given, reason in (
        (other("speed"), r"of another space \(rate\).*'speed' is not found"),
        (other(low=0, suggest="suggest_int"), "of another space.*distribution kind"),
        (lambda t: {"rate": 0.1, "mu": 0.1}, "of another space.*'rate'"),
    ):
        refused(reason, fp.tune, make, model, CLIENTS, space=given, **options | {"trials": 2})
    for given, reason in (
        ({"rounds": 3}, "has 2 rounds, and this call asks for 3"),
        ({"rounds": 1}, "has 2 rounds, and this call asks for 1"),
        ({"batch_size": 3}, "was run with another config: batch_size: 4 -> 3"),
    ):
        refused(reason, fp.tune, model, make, CLIENTS, space=space, **options | given)
    for name in ("a?b", "a%20b"):
        with pytest.raises(InputError, match=r"has '[?%]' in its name"):
            fp.tune(model, make, CLIENTS, space=space, **options | {"out": tmp_path / name})
        assert not (tmp_path / name).exists()
    two = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InputError, match="has 2 objectives, and tune optimises one"):
        fp.tune(model, make, CLIENTS, space=space, study=two, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choose_by": "validation_los"}, "There is no metric 'validation_los'.*validation_loss"),
        ({"study": "maximize"}, "The study would maximize validation_loss, of which lower values"),
        ({"batch": 0}, "batch = 0 must be at least 1"),
    ],
)
def test_bad_requests_are_refused(model, change, message):
    if "study" in change:
        change = {"study": study(direction=change["study"])}
    with pytest.raises(InputError, match=message):
        fp.tune(model, make, CLIENTS, **{**OPTIONS, "space": space, "trials": 1, **change})
