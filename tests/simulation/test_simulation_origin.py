"""A run that starts from another one goes on where that one ended."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import running
import safetensors.numpy
import tomli_w
import toy
from closeness import assert_close
from internals import cli, read_metrics
from refusals import refused
from shallow import simple_encoder  # noqa: F401
from small_config import small

import fedjax_peft as fp
from fedjax_peft import InputError, testing

pytestmark = pytest.mark.slow

SIZES, TEST = (7, 4, 12, 9), toy.dataset(20, seed=3)
model = functools.cache(functools.partial(toy.model, dropout=0))
lora_model = functools.cache(toy.lora_model)


@functools.cache
def scaffold():
    return fp.algorithms.scaffold(optax.sgd(0.1), learning_rate=0.1, head="private")


def run(rounds, start=None, algorithm=None, sizes=SIZES, **options):
    """Rounds of one step over all examples, so that they depend on nothing but the states."""
    options |= {"model": model() if start is None else start.trained, "batch_size": 16}
    options |= {"clients": toy.clients(sizes), "test": TEST, "origin": start}
    return running.run(algorithm or scaffold(), rounds=rounds, **options)


@pytest.fixture(scope="module")
def straight():
    return run(4)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return run(2, out=tmp_path_factory.mktemp("first") / "run")


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.sample("disk")
def test_rounds_go_on_from_the_states_of_clients_and_server(place, straight, first, tmp_path):
    """SCAFFOLD's control variates of clients and server belong together, beside private heads."""
    again = run(2, first, out=tmp_path / "again", client_state=place)
    for client in range(len(SIZES)):
        one, other = straight.client_params(client), again.client_params(client)
        for name in one:
            assert_close(other[name], one[name], rtol=1e-5, atol=1e-6)
    begins = again.metrics[0]["origin"]
    assert begins.pop("anew") == ["rounds"]
    assert begins == {"run": str(first.out.resolve()), "round": 2, "seen": [0, 1, 2, 3]}
    assert again.metrics[0]["test_accuracy"] == first.metrics[-1]["test_accuracy"]
    assert again.metrics[0]["test_count_seen"] == 4


@functools.cache
def clipping():
    return fp.algorithms.fedavg(optax.sgd(0.1), aggregator=fp.aggregators.centred_clipping(0.05))


@pytest.mark.parametrize(("place", "loaded"), [("device", False), ("disk", True)])
@pytest.mark.sample("disk-*")
def test_aggregator_and_transforms_go_on_too(place, loaded, tmp_path):
    """Centred clipping keeps its last update, and error feedback what every client has not sent."""
    options = {"algorithm": clipping(), "transforms": fp.transforms.sign()}
    whole = run(2, **options)
    first = run(1, **options, out=tmp_path / "a", client_state=place)
    if loaded:
        first = fp.load_run(tmp_path / "a", model=model(), algorithm=clipping())
    place = "disk" if place == "device" else "device"  # what clients keep moves to another place
    again = run(1, first, **options, client_state=place)
    for name, leaf in whole.params.items():
        assert_close(again.params[name], leaf, rtol=1e-5, atol=1e-6)
    assert again.metrics[0]["origin"]["anew"] == ["rounds"]
    other = run(1, first, fp.algorithms.fedavgm(optax.sgd(0.1)))
    lost = ["rounds", "server", "aggregator_state", "transform_state.memory"]
    assert other.metrics[0]["origin"]["anew"] == lost
    assert other.metrics[0]["origin"]["seen"] == [0, 1, 2, 3]


def test_clients_whose_private_leaves_are_new_have_not_trained():
    shared, end = run(1, None, plain()), {"on_round": lambda row: True}  # after row 0
    row = run(1, shared, **end).metrics[0]
    assert (row["origin"]["seen"], row["test_count_seen"], row["test_count_unseen"]) == ([], 0, 4)
    fewer = run(1, shared, plain(), sizes=SIZES[:2], **end)  # of other clients
    assert fewer.metrics[0]["origin"]["seen"] == []


plain = functools.cache(lambda: fp.algorithms.fedavg(optax.sgd(0.1)))


def test_an_adaptive_clip_norm_goes_on():
    adaptive = fp.privacy.adaptive(0.5, noise_multiplier=0.1, delta=1e-3)
    ended = run(1, None, plain(), privacy=adaptive)
    again = run(1, ended, plain(), privacy=adaptive)
    norm = float(ended.kept["aggregator_state"]["clip"])
    assert again.metrics[1]["privacy_clip"] == norm != 0.5
    assert again.metrics[0]["origin"]["anew"] == ["rounds"]


def test_correlated_noise_begins_anew():
    """What a guarantee says of it holds for the rounds of one run."""
    noise = fp.privacy.correlated(1.0, 1.0, rounds=2, delta=1e-3)
    options = {"privacy": noise, "clients_per_round": 2, "sampling": "round_robin"}
    first = run(1, None, plain(), **options)
    kept = first.kept["aggregator_state"]
    zeros = jax.tree.map(jnp.zeros_like, kept)
    assert first.algorithm.aggregator.carry(kept, zeros)["noise"] is zeros["noise"]
    again = run(1, first, plain(), **options)
    assert again.metrics[0]["origin"]["anew"] == ["rounds", "aggregator_state.noise"]


def test_clients_at_work_for_an_asynchronous_server_are_named():
    server = fp.asynchronous.fedbuff(buffer_size=1)
    first = run(1, None, plain(), asynchronous=server, clients_per_round=3)
    again = run(1, first, plain(), asynchronous=server, clients_per_round=3)
    assert again.metrics[0]["origin"]["anew"] == ["rounds", "history"]


def test_an_attempt_that_failed_leaves_no_start(straight, first, tmp_path):
    out = tmp_path / "run"

    def fail(phase):
        if phase.name == "starting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(1, straight, out=out, on_phase=fail)
    (out / "vocabulary.json").touch()
    run(1, first, out=out, on_round=lambda row: True)
    begun = safetensors.numpy.load_file(out / "origin.safetensors")
    for name, leaf in first.trained.trainable.items():
        np.testing.assert_array_equal(begun[name], leaf)
    assert not (out / "vocabulary.json").exists()


def test_an_interrupted_start_resumes_to_the_same_numbers(first, tmp_path):
    """Its first checkpoint holds the states, also before round 1."""
    whole = run(2, first)
    with pytest.raises(KeyboardInterrupt):
        run(2, first, out=tmp_path / "run", on_round=running.interrupt(1))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["0"]
    again = run(2, first, out=tmp_path / "run", resume=True)
    assert running.rows(again) == running.rows(whole)


@pytest.mark.parametrize("make", [fp.algorithms.fedex, fp.algorithms.flora])
@pytest.mark.sample("fedex")
def test_what_a_server_has_added_to_frozen_leaves_is_part_of_the_start(make, tmp_path):
    algorithm = make(optax.sgd(0.1))
    options = {"test": TEST, "batch_size": 16, "clients": toy.clients(SIZES), "rounds": 1}
    before = running.run(algorithm, model=lora_model(), out=tmp_path / "a", **options)
    loaded = fp.load_run(tmp_path / "a", model=lora_model(), algorithm=algorithm)
    trained = loaded.trained
    for name, leaf in {**before.trained.frozen, **before.trained.trainable}.items():
        assert_close({**trained.frozen, **trained.trainable}[name], leaf, rtol=1e-5, atol=1e-6)
    after = running.run(algorithm, model=trained, out=tmp_path / "b", origin=loaded, **options)
    assert_close(
        after.metrics[0]["test_loss"], before.metrics[-1]["test_loss"], rtol=1e-5, atol=1e-6
    )
    again = fp.load_run(tmp_path / "b", model=after.model, algorithm=algorithm)
    for name, leaf in after.trained.frozen.items():
        assert_close(again.trained.frozen[name], leaf, rtol=1e-5, atol=1e-6)


def test_clients_that_keep_something_else_are_refused(first):
    for other in ({"sizes": (*SIZES, 5)}, {"algorithm": fp.algorithms.ditto(optax.sgd(0.1))}):
        refused("or start from its global model only", run, 1, first, **other)
    with pytest.raises(
        InputError, match=r"fp.simulate\(run.trained, ..., records=fp.Records\(origin=run\)\)"
    ):
        fp.simulate(
            model(), scaffold(), toy.clients(SIZES), rounds=1, records=fp.Records(origin=first)
        )


def test_the_refusal_of_a_resume_names_the_way(first, tmp_path):
    out = shutil.copytree(first.out, tmp_path / "run")
    refused("with --from", run, 2, out=out, resume=True, local_steps=3)


def test_a_guarantee_says_that_it_counts_its_own_rounds_only(first):
    central = fp.privacy.central(1.0, noise_multiplier=1.0)
    private = run(1, first, privacy=central, on_round=lambda row: True)  # row 0 says it
    statement = private.metrics[0]["privacy"]["statement"]
    assert statement.endswith(
        f"The run starts from {first.out.resolve()}, and ε counts its own rounds only. That run"
        " gives no guarantee of differential privacy."
    )


@pytest.mark.long("three commands, each of which needs the one before it")
@pytest.mark.usefixtures("simple_encoder")
def test_the_command_line_starts_from_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    testing.write_tiny_checkpoint(tmp_path / "model")
    testing.write_tiny_texts(tmp_path / "data", train=24, test=8)
    config = small(
        model={"name": str(tmp_path / "model")},
        data={"name": str(tmp_path / "data" / "train.jsonl"), "max_length": 16},
        peft={"rank": 2},
        algorithm={"name": "fedavg", "head": "private"},
        local_steps=1,
    )
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config))
    again = ["run", "c.toml", "seed=1", "optimizer.learning_rate=1e-3", "-q"]
    assert cli.main(["run", "c.toml", "--out", "a", "-q"]) == 0
    assert cli.main([*again, "--from", "a", "--out", "a"]) == 2
    assert "is the run to start from" in capsys.readouterr().err
    assert cli.main([*again, "--from", "a", "--out", "b", "peft.rank=4"]) == 2
    assert "peft.rank is 2 there and 4 here" in capsys.readouterr().err
    assert cli.main([*again, "--from", "a", "--out", "b", "data.seed=1"]) == 2
    assert "examples of test are training examples of" in capsys.readouterr().err
    (tmp_path / "a" / "adapter").mkdir()
    adapter = ["peft={name='pretrained', adapter='a/adapter'}", "data.seed=1", "--out", "c"]
    assert cli.main([*again, *adapter]) == 2
    assert "examples of test are training examples of" in capsys.readouterr().err
    assert cli.main([*again, "--from", "a", "--out", "b"]) == 0
    first, second = (read_metrics(tmp_path / name / "metrics.jsonl") for name in "ab")
    assert second[0]["test_accuracy"] == first[-1]["test_accuracy"]
    assert second[0]["origin"]["run"] == str(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")  # the new run needs it no longer
    assert cli.main(["resume", "b", "rounds=2", "-q"]) == 0
    run = fp.load_run("b")
    assert run.metrics[-1]["round"] == 2
    assert run.trained.trainable.keys() == run.client_params(0).keys()
    assert cli.main([*again, "--resume", "--out", "b"]) == 2
    assert "origin" in capsys.readouterr().err
