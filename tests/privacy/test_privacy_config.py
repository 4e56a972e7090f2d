"""``[privacy]`` and ``[attack]`` in a config: their keys, ``epsilon`` instead of noise, sweeps."""

import json

import pytest
import tomli_w
from closeness import approx
from compiled import compilations
from internals import (
    Parts,
    _tuples,
    accounting,
    explicit,
    main,
    read_metrics,
    read_toml,
    running,
    sweeps,
)
from internals import config as configs
from shallow import simple_encoder  # noqa: F401
from small_config import small

import fedjax_peft as fp
from fedjax_peft import InputError, testing
from fedjax_peft.cli.explain import explain

pytestmark = pytest.mark.slow

OWN = '''
"""A mechanism and an attack that only report their numbers, from inside the program."""
import jax.numpy as jnp
from fedjax_peft.privacy import accounting, guarantees, statements
from fedjax_peft.contracts import Attack, Privacy, Wrapped


def shown(algorithm, **values):
    before = algorithm.round_metrics
    return algorithm._replace(
        round_metrics=lambda r: {**before(r), **{k: jnp.float32(v) for k, v in values.items()}}
    )


def mechanism(clip: float, noise_multiplier: float, delta: float = 1e-5):
    return Privacy(
        "mechanism",
        "client",
        lambda algorithm, facts: shown(algorithm, noise=noise_multiplier, clip=clip),
        lambda facts, rounds: guarantees.client_guarantee(noise_multiplier, delta, facts, rounds),
        statements.composition_in_words,
    )


def attack(share: float = 0.2):
    def apply(algorithm, facts):
        return Wrapped(shown(algorithm, share=share))

    return Attack("attack", apply, lambda n: ())
'''


@pytest.fixture(scope="module")
def raw(simple_encoder, tmp_path_factory):  # noqa: F811
    root = tmp_path_factory.mktemp("project")
    testing.write_tiny_checkpoint(root / "model")
    testing.write_tiny_texts(root / "data", train=24, test=4)
    (root / "own.py").write_text(OWN)
    config = small(
        **{"rounds": 2, "clients_per_round": 2, "sampling": "poisson", "local_steps": 1},
        evaluation={"every": 2},
        model={"name": str(root / "model")},
        data={"name": str(root / "data"), "max_length": 16, "seed": 0},
        peft={"rank": 2},
        privacy={"name": "own.py:mechanism", "clip": 1.0, "epsilon": 2.0},
        attack={"name": "own.py:attack", "share": 0.5},
    )
    (root / "config.toml").write_text(tomli_w.dumps(config))
    return configs.load(root / "config.toml")


@pytest.fixture(scope="module")
def run(raw, tmp_path_factory):
    return configs.run(configs.resolve(raw), out=tmp_path_factory.mktemp("runs") / "run")


def needed(epsilon):
    return fp.privacy.noise_multiplier(epsilon, 1e-5, 2, 0.5)


def test_epsilon_is_solved_for_the_noise_of_these_clients_and_rounds(run):
    recorded = read_toml(run.out / "config.toml")["privacy"]
    assert recorded["epsilon"] == 2.0
    assert recorded["noise_multiplier"] == approx(needed(2.0), rel=1e-5)
    row = read_metrics(run.out / "metrics.jsonl")[-1]
    assert row["noise"] == approx(needed(2.0), rel=1e-5)
    assert row["epsilon"] == approx(2.0, rel=1e-4)
    assert row["epsilon"] <= 2.0
    assert row["share"] == 0.5


def test_a_run_is_loaded_and_continued_with_its_recorded_noise(run):
    # The facts of the run are recorded exactly.
    facts = read_metrics(run.out / "metrics.jsonl")[0]["federation"]
    restored = fp.contracts.Federation(**{name: _tuples(value) for name, value in facts.items()})
    assert hash(restored)
    assert dict(restored.columns)["input_ids"] == (16,)
    assert fp.load_run(run.out).algorithm.round_metrics(1).keys() >= {"noise", "share"}
    recorded = configs.resolve_recorded(read_toml(run.out / "config.toml"))
    row = configs.run(recorded | {"rounds": 3}, out=run.out, resume=True).metrics[-1]
    assert row["noise"] == approx(needed(2.0), rel=1e-5)
    assert row["epsilon"] > 2.0


def test_a_run_is_repeated_from_its_own_config_and_continued_from_its_users(raw, run):
    own = configs.resolve(configs.load(run.out / "config.toml")) | {"rounds": 2}
    assert (own["privacy"]["epsilon"], own["privacy"]["noise_multiplier"]) == (2.0, None)
    asked = configs.resolve(raw)

    def noise(config, **options):
        recorded = configs.run(config, act=lambda *_, records, **__: records.config, **options)
        return recorded["privacy"]["noise_multiplier"]

    assert noise(own) == noise(asked) == approx(needed(2.0), rel=1e-5)
    continued = {"out": run.out, "resume": True}
    for config in (own, asked):
        assert noise({**config, "rounds": 9}) > needed(2.0)
        assert noise({**config, "rounds": 9}, **continued) == approx(needed(2.0), rel=1e-5)
    other = {**asked, "privacy": {**asked["privacy"], "epsilon": 4.0}}
    assert noise(other, **continued) == noise(other) == approx(needed(4.0), rel=1e-5)


def test_a_config_needs_the_noise_once(raw):
    for change, said in (
        ("privacy.noise_multiplier=1.0", "has both"),
        ("privacy.epsilon=", "has neither"),
    ):
        with pytest.raises(InputError, match=f"one of noise_multiplier and epsilon, and {said}"):
            configs.resolve(configs.override(raw, change))
    both = configs.override(configs.override(raw, "privacy.epsilon="), "privacy.noise_multiplier=3")
    assert configs.with_noise(configs.resolve(both), None)["privacy"]["noise_multiplier"] == 3.0


def test_a_method_can_have_a_mechanism_and_leave_it_out(raw):
    raw = {**raw, "methods": {"private": {}, "plain": {"privacy": {}, "attack": {}}}}
    del raw["privacy"]
    made = configs.methods(raw, ["methods.private.privacy.name=own.py:mechanism"])
    assert made["private"]["privacy"]["name"].endswith("own.py:mechanism")
    assert configs.resolve(made["plain"])["privacy"] == {}


def test_a_config_without_the_tables_has_no_mechanism(raw):
    plain = {k: v for k, v in raw.items() if k not in ("privacy", "attack")}
    resolved = configs.resolve(plain)
    assert configs.build_privacy(resolved) is None
    assert configs.build(resolved, "attack") is None
    assert "privacy" not in configs.describe(resolved)
    assert "mechanism privacy" in configs.describe(configs.resolve(raw))


def test_a_sweep_over_epsilon_clip_and_share_compiles_once(raw):
    grid = ["privacy.epsilon=1.0,4.0", "privacy.clip=0.5,2.0", "attack.share=0.25,0.5"]
    points = sweeps.plan(raw, grid).points
    parts, counted, rows = Parts(), [], []
    for point in (points[0], points[-1]):
        before = len(compilations)
        rows.append(configs.run(point.config, parts=parts).metrics[-1])
        counted.append(len(compilations) - before)
    assert counted[0] > 0
    assert counted[1] == 0
    assert [row["noise"] for row in rows] == approx([needed(1.0), needed(4.0)], rel=1e-5)
    assert [(row["clip"], row["share"]) for row in rows] == [(0.5, 0.25), (2.0, 0.5)]
    assert [row["epsilon"] for row in rows] == approx([1.0, 4.0], rel=1e-4)


def test_a_sweep_over_the_noise_multiplier_is_at_run_time(raw):
    raw = configs.override(raw, "privacy.epsilon=")
    points = sweeps.plan(raw, ["privacy.noise_multiplier=1.0,2.0"]).points
    made = [running.made_from_values(point.config) for point in points]
    assert made[0]["privacy"] == made[1]["privacy"]
    assert made[0]["values"] == {"privacy.noise_multiplier": 1.0}


def test_the_keys_are_explained():
    assert "in place of noise_multiplier" in explain("privacy.epsilon")
    assert "differential privacy" in explain("privacy")
    assert "hostile clients" in explain("attack")


def test_a_dry_run_says_the_guarantee_before_training(raw, tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(json.loads(json.dumps(raw))))
    assert main(["run", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "1e-05)-differential privacy of each client. mechanism: It compares" in said


def test_correlated_noise_is_recorded_for_the_rounds_it_was_made_for(raw):
    turns = {"name": "correlated", "clip": 1.0, "epsilon": 2.0}
    given = configs.resolve({**raw, "privacy": turns, "sampling": "round_robin"})
    data, clients = configs.federation(given)
    config = configs.with_noise(explicit(given, data), clients)
    assert config["privacy"]["rounds"] == 2
    # 2 of 4 clients take turns: each takes part once, in one Gaussian mechanism.
    expected = fp.privacy.noise_multiplier(2.0, 1e-5, 1)
    assert config["privacy"]["noise_multiplier"] == approx(expected, rel=1e-5)


def test_the_mechanism_of_a_config_is_accounted_without_amplification_if_clients_are_listed(raw):
    resolved = configs.resolve(configs.override(raw, 'sampling="uniform"'))
    _, clients = configs.federation(resolved)
    found = configs.with_noise(resolved, clients)["privacy"]["noise_multiplier"]
    assert found == approx(fp.privacy.noise_multiplier(2.0, 1e-5, 2), rel=1e-5)
    assert accounting.epsilon(accounting.gaussian_event(found, 2), 1e-5) <= 2.0


def test_a_personal_model_of_a_private_run_is_for_its_client_only(raw, tmp_path, capsys):
    # Its server has a state, which is restored from the run.
    adaptive = {"name": "adaptive", "clip": 1.0, "noise_multiplier": 1.0}
    given = {k: v for k, v in raw.items() if k != "attack"}
    config = configs.resolve({**given, "privacy": adaptive, "algorithm": "fedper", "rounds": 1})
    done = configs.run(config, out=tmp_path / "run")
    client = str(done.metrics[-1]["clients"][0]) if done.metrics[-1]["clients"] else "0"
    with pytest.warns(UserWarning, match="Give it to this client only"):
        fp.load_run(done.out).export(tmp_path / "python", client=int(client))
    words = ["export", str(done.out), "--client", client, "--out", str(tmp_path / "command")]
    assert main(words) == 0
    assert "a client's personal model was trained on its examples" in capsys.readouterr().err
