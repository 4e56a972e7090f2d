"""Loading run directories: ``fp.load_run``, and the command line for runs made in Python."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
import running
import tomli_w
import toy
from closeness import EXACT, assert_close
from internals import cli
from options import run_options
from refusals import refused
from safetensors.numpy import load_file, save_file
from shallow import draw_nothing, simple_encoder  # noqa: F401
from small_config import small

import fedjax_peft as fp
from fedjax_peft.simulation.client_models import check_global

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simple_encoder")]

ADAM = optax.adam(1e-2)
RARE = pytest.mark.exhaustive
TEXTS = ["w1 w9 w9", "w30 w31"]
ALGORITHMS = {
    "shared": fp.algorithms.fedavg(ADAM),
    "private": fp.algorithms.fedavg(ADAM, head="private"),
    "folded": fp.algorithms.flora(ADAM),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """Returns finished runs of a loaded model by name of their algorithm."""
    root = tmp_path_factory.mktemp("runs")
    clients = fp.partition.iid(fp.testing.tiny_dataset(12), clients=3)
    model = fp.load_model(
        checkpoint, head=fp.heads.classification([f"class {i}" for i in range(4)])
    )
    attached = {
        "shared": fp.attach(model, fp.lora(rank=2, init="svd"), seed=5),
        "private": fp.attach(model, fp.lora(rank=2)),
        "folded": fp.attach(model, fp.lora(rank=2)),
    }
    options = {"rounds": 2, "local_steps": 1, "batch_size": 4}
    return {
        name: fp.simulate(
            attached[name], algorithm, clients, out=root / name, **run_options(**options)
        )
        for name, algorithm in ALGORITHMS.items()
    }


def assert_same(loaded, run):
    for one, other in ((loaded.params, run.params), (loaded.trained.frozen, run.trained.frozen)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("name", ["shared", "folded"])
@pytest.mark.long("the first case makes the runs of all")
def test_a_run_made_in_python_loads_without_its_algorithm(name, runs, tmp_path):
    run = runs[name]
    loaded = fp.load_run(run.out)
    assert_same(loaded, run)
    assert loaded.metrics == json.loads(json.dumps(run.metrics))
    assert (repr(loaded), loaded.max_length) == (repr(run), 12)
    np.testing.assert_array_equal(loaded.predict(TEXTS), run.predict(TEXTS))
    if name == "folded":
        refused("format 'merged'", loaded.export, tmp_path / "adapter")
        loaded.export(tmp_path / "merged", format="merged")
        run.export(tmp_path / "other", format="merged")
        files = [load_file(tmp_path / d / "model.safetensors") for d in ("merged", "other")]
    else:
        loaded.export(tmp_path / "adapter")
        run.export(tmp_path / "other")
        names = [tmp_path / d / "adapter_model.safetensors" for d in ("adapter", "other")]
        files = [load_file(path) for path in names]
    for key, value in files[1].items():
        np.testing.assert_array_equal(files[0][key], value)


def test_models_of_clients_load_without_the_algorithm(runs):
    run = runs["private"]
    for loaded in (fp.load_run(run.out), fp.load_run(run.out, algorithm=ALGORITHMS["private"])):
        for client in range(3):
            ours, theirs = loaded.client_params(client), run.client_params(client)
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    with pytest.raises(fp.InputError, match="No checkpoint"):
        fp.load_run(run.out, algorithm=fp.algorithms.scaffold(optax.sgd(0.1), learning_rate=0.1))


def toy_run(out, algorithm, sizes=(6, 4, 5), **options):
    options = {"rounds": 2, "local_steps": 1, "batch_size": 4, "clients_per_round": 2, **options}
    return fp.simulate(
        toy.model(), algorithm, toy.clients(sizes), out=out, **run_options(**options)
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (fp.algorithms.ditto(fp.optimizers.sgd(0.1), lam=0.2), {}),
        pytest.param(fp.algorithms.ditto(ADAM, head="private"), {}, marks=RARE),
        pytest.param(fp.algorithms.fedper(fp.optimizers.adamw(0.1, keep=True)), {}, marks=RARE),
        (fp.algorithms.fedper(fp.optimizers.kept(fp.optimizers.adam(0.1))), {}),
        (
            fp.algorithms.fedavg(
                fp.schedules.scheduled(fp.optimizers.adam(0.1), fp.schedules.cosine(rounds=5)),
                head="private",
            ),
            {
                "sampling": "poisson",
                "privacy": fp.privacy.central(noise_multiplier=1.0, clip=1.0),
                "transforms": [fp.transforms.clip_norm(1.0)],
            },
        ),
        (
            fp.algorithms.fedadam(ADAM, server_learning_rate=0.1, head="private"),
            {"attack": fp.attacks.sign_flip(0.4), "transforms": fp.transforms.top_k(0.5)},
        ),
    ],
)
def test_runs_with_private_leaves_need_their_directory_only(algorithm, options, tmp_path):
    run = toy_run(tmp_path / "run", algorithm, **options)
    loaded = fp.load_run(run.out, model=toy.model())  # the toy is no model of the library
    assert_same(loaded, run)
    for client in range(3):
        ours, theirs = loaded.client_params(client), run.client_params(client)
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert fp.call_of(loaded.algorithm) is None or "optax" not in repr(fp.call_of(run.algorithm))


@pytest.mark.parametrize(
    ("keeping", "sizes"),
    [
        (fp.algorithms.fedper(fp.optimizers.kept(ADAM)), (6, 4)),
        (fp.algorithms.centralised(ADAM), (6,)),
    ],
)
def test_what_is_not_recorded_is_asked_for_by_name(keeping, sizes, tmp_path):
    run = toy_run(tmp_path / "run", keeping, sizes, clients_per_round=len(sizes))
    with pytest.raises(
        fp.InputError, match=r"optimizer.* \(a Gradient.* is not recorded.*algorithm=\.\.\."
    ):
        fp.load_run(run.out, model=toy.model())
    assert_same(fp.load_run(run.out, model=toy.model(), algorithm=keeping), run)


def test_a_config_of_the_users_may_lack_the_model(tmp_path):
    """Also the name of an algorithm alone, which is no table."""
    algorithm, model, out = ALGORITHMS["shared"], toy.model(), tmp_path / "run"
    records = fp.Records(config={"algorithm": "mine", "note": 1})
    run = fp.simulate(
        model,
        algorithm,
        toy.clients([4, 4]),
        rounds=1,
        test=toy.dataset(4),
        out=out,
        records=records,
    )
    refused(r"cannot be made again.*model=\.\.\.", fp.load_run, out)
    assert_same(fp.load_run(out, model=model, algorithm=algorithm), run)


def test_the_command_line_predicts_and_exports_runs_of_python(runs, tmp_path, capsys):
    run, file, answers = runs["shared"], tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert cli.main(["predict", str(run.out), "--input", str(file), "--output", str(answers)]) == 0
    logits = [json.loads(line)["logits"] for line in answers.read_text().splitlines()]
    assert_close(np.array(logits), run.predict(TEXTS), **EXACT)
    assert cli.main(["export", str(run.out), "--out", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    capsys.readouterr()
    assert cli.main(["export", str(runs["private"].out), "--out", str(tmp_path / "x")]) == 2
    assert "private to the clients" in capsys.readouterr().err


def test_other_base_weights_are_noticed(runs, checkpoint, tmp_path):
    out, moved = tmp_path / "run", tmp_path / "model"
    shutil.copytree(runs["private"].out, out)
    shutil.copytree(checkpoint, moved)
    config = (out / "config.toml").read_text()
    (out / "config.toml").write_text(config.replace(str(checkpoint), str(moved)))
    weights = load_file(moved / "model.safetensors")
    name = next(n for n in weights if n.endswith("query.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(fp.InputError, match=r"base weights of .*query.*' differs.*model=\.\.\."):
        fp.load_run(out, algorithm=ALGORITHMS["private"])
    loaded = fp.load_run(out, model=runs["private"].model, algorithm=ALGORITHMS["private"])
    assert_same(loaded, runs["private"])


def test_a_model_of_ones_own_is_given(tmp_path):
    model, out = toy.model(), tmp_path / "run"
    run = fp.simulate(model, ALGORITHMS["shared"], toy.clients([4, 4]), rounds=1, out=out)
    refused(r"cannot be made again.*of your own.*model=\.\.\.", fp.load_run, out)
    assert_same(fp.load_run(out, model=model), run)
    with pytest.raises(fp.InputError, match=r"do not fit the model: 'head\.kernel' is \(6, 3\)"):
        fp.load_run(out, model=toy.model(width=7))
    refused("is not a run directory", fp.load_run, tmp_path)


def test_a_run_of_a_config_loads_from_its_directory_alone(checkpoint, tmp_path, capsys):
    """Also if its preset is gone since."""
    data = fp.testing.write_tiny_texts(tmp_path / "data", train=12, test=4)
    config = small(
        model={"name": str(checkpoint)},
        data={"name": str(data), "max_length": 12},
        peft={"rank": 2},
        algorithm={"name": "fedavg", "head": "private"},
        local_steps=1,
    )
    (tmp_path / "c.toml").write_text(tomli_w.dumps(config))
    out = tmp_path / "run"
    assert cli.main(["run", str(tmp_path / "c.toml"), "preset=fedlr", "--out", str(out), "-q"]) == 0
    run = fp.load_run(out)
    assert (run.algorithm.name, len(run.metrics), run.max_length) == ("fedavg", 2, 12)
    assert run.predict(TEXTS, client=1).shape == (2, 4)
    assert run.client_params(0)["classifier.bias"].shape == (4,)
    config = (out / "config.toml").read_text()
    assert 'preset = "fedlr"' in config
    (out / "config.toml").write_text(config.replace('"fedlr"', '"ffa_lora"'))  # renamed since
    assert_same(fp.load_run(out), run)
    assert cli.main(["resume", str(out)]) == 0
    assert "nothing to resume" in capsys.readouterr().out


def test_the_refusal_of_a_global_model_counts_the_leaves():
    with pytest.raises(fp.InputError, match="2 of the 4 trained leaves are private to the clients"):
        check_global(toy.model(), running.PRIVATE, "Choose a client.")
