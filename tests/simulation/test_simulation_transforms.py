"""Upload transforms in ``simulate``: bytes, records, configs, refusals."""

import functools
import re

import documented_fields
import optax
import pytest
import running
import toy
from closeness import assert_close
from internals import Ledger, assign_roles, explain, forecast, made_from_values, sweeps
from internals import config as configs
from refusals import refusals, refused
from running import CLIENTS, FEDAVG, PRIVATE
from small_config import small
from toy_transforms import feedback, ones, record

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, transforms

pytestmark = pytest.mark.slow

SGD = optax.sgd(0.1)
TOY_ADAPTER, TOY_HEAD = (5 * 2 + 2 * 6) * 4, (6 * 3 + 3) * 4
BOTH = (transforms.clip_norm(0.2), feedback())


def run(out=None, *, rounds=2, given=BOTH, algorithm=None, **options):
    options = {"clients_per_round": 3, "lanes": 2} | options
    return running.run(algorithm or PRIVATE, rounds=rounds, out=out, transforms=given, **options)


@functools.cache
def whole():
    """Returns a run in which all five clients take part."""
    return run(algorithm=FEDAVG, clients_per_round=5)


def test_the_rows_have_the_metrics_of_transforms_and_the_table_knows_them():
    row = whole().metrics[-1]
    assert 0 <= row["clip_share"] <= 1
    assert row["clip_median_norm"] > 0
    assert row["feedback_length"] > 0
    for name in ("clip_share", "clip_median_norm"):
        assert documented_fields.find(name) is not None


def test_a_row_without_an_accepted_upload_has_no_share():
    poisoned = toy.poisoned(CLIENTS, *range(5))
    row = run(clients=poisoned, rounds=1, algorithm=FEDAVG, clients_per_round=5).metrics[-1]
    assert (row["clip_share"], row["clip_median_norm"]) == (None, None)


# ------------------------------------------------------------------------------------------- bytes


def ledger(algorithm, transform=None):
    model = toy.model()
    names = assign_roles(model.kinds, algorithm.roles)
    server = algorithm.server.init(fp.tree.select(model.trainable, names["shared"]))
    return Ledger(model, algorithm, server, 4, transform=transform)


@pytest.mark.parametrize("across_leaves", [False, True])
def test_a_share_of_a_leaf_limits_what_a_transform_chooses_of_it(across_leaves):
    top = transforms.top_k(0.5, across_leaves=across_leaves)
    counted, names = ledger(algorithms.fedavg(SGD), top), list(toy.model().trainable)
    most, few = (counted.up(0, (), dict.fromkeys(names, share)) for share in (0.9, 0.2))
    assert most == counted.up(0), "nine tenths of a leaf hold its larger half"
    assert 0.3 * most < few < 0.5 * most


def test_nothing_is_chosen_of_a_leaf_that_rests():
    top = transforms.top_k(0.9, across_leaves=True)
    counted, entries = ledger(algorithms.rolora(SGD), top), (TOY_ADAPTER + TOY_HEAD) // 4
    assert counted.up(0) == -(-(-(-entries * 9 // 10) * 32 + entries) // 8)  # and a bitmap
    assert counted.up(0, ["layer.lora_b"]) == -(-((entries - 12) * 32 + entries) // 8)


def test_bytes_of_a_transform_replace_those_of_the_leaves():
    whole = TOY_ADAPTER + TOY_HEAD
    assert ledger(algorithms.fedavg(SGD), transforms.clip_norm(1.0)).up(0) == whole
    halved = ledger(algorithms.fedavg(SGD), transforms.chain(BOTH[0], feedback()))
    assert halved.up(0) == whole // 2
    # The broadcast, and the length that clients receive: a float32.
    assert halved.down(0) == whole + 4
    halved.record({"round": 1, "clients": [0], "dropped": [0]})
    assert halved.down(0) == 0, "its upload was dropped: nothing has changed since it was there"
    halved.record({"round": 2, "clients": [1], "dropped": []})
    assert halved.down(0) == whole + 4
    # Only the model's change is transformed, not SCAFFOLD's control variate.
    scaffold = algorithms.scaffold(SGD, learning_rate=0.1)
    assert ledger(scaffold, feedback()).up(0) == whole // 2 + whole


def test_noise_changes_what_clients_fetch_in_a_round_without_uploads():
    private = fp.privacy.central(1.0, 1.0).protect(FEDAVG, None)
    for algorithm, fetched in ((FEDAVG, 0), (private, TOY_ADAPTER + TOY_HEAD)):
        counted = ledger(algorithm)
        counted.record({"round": 1, "clients": [], "dropped": [], "failed": [0]})
        assert counted.down(0) == fetched


def test_a_run_and_its_forecast_count_the_same_bytes():
    made = whole()
    assert made.metrics[1]["bytes_up"] == 5 * (TOY_ADAPTER + TOY_HEAD) // 2
    expected = forecast(
        toy.model(),
        FEDAVG,
        clients=5,
        rounds=2,
        steps=1,
        transform=transforms.chain(*BOTH),
    )
    assert expected.bytes_up == sum(row["bytes_up"] for row in made.metrics)
    assert expected.bytes_down == sum(row["bytes_down"] for row in made.metrics)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("algorithm", "transform", "message"),
    [
        (algorithms.flora(SGD), BOTH[0], "every client starts from a random A of its own"),
        (algorithms.hetlora(SGD, prune=0.5), BOTH[0], "Leave prune out"),
        (
            algorithms.fedavg(SGD, aggregator=aggregators.fra()),
            feedback(),
            "The aggregator 'fra' does not form that mean. Use an aggregator that is linear",
        ),
        (algorithms.fedex(SGD), feedback(), "The aggregator 'fedex' does not form that mean"),
        (algorithms.fedavg(SGD), "clip_norm", "Give the object and not its name"),
        (algorithms.fedavg(SGD), [ones(), transforms.clip_norm], "Call it: clip_norm"),
    ],
)
def test_invalid_combinations_are_errors_with_a_reason(algorithm, transform, message, tmp_path):
    refused(message, run, tmp_path / "run", given=transform, algorithm=algorithm)
    assert not (tmp_path / "run").exists()


def test_transforms_without_a_server_part_work_with_every_aggregator():
    fra = algorithms.fedavg(SGD, aggregator=aggregators.fra())
    made = run(rounds=1, given=[transforms.clip_norm(0.01), record()], algorithm=fra)
    assert_close(made.metrics[-1]["largest_norm"], 0.01, rtol=1e-5)


# ----------------------------------------------------------------------------------------- configs


def test_a_config_names_transforms_with_their_options():
    config = configs.resolve(small(transforms={"clip_norm": {"max_norm": 0.5}}))
    assert config["transforms"] == {"clip_norm": {"max_norm": 0.5}}
    assert configs.resolve(config) == config
    (made,) = configs.build(config, "transforms")
    assert made.name == "clip_norm"
    assert configs.build(configs.resolve(small()), "transforms") == []
    assert "fedavg with clip_norm over lora" in configs.describe(config)


def test_a_key_of_a_transform_is_set_on_the_command_line_and_a_method_takes_them_out():
    raw = configs.override(small(), "transforms.clip_norm.max_norm=2.0")
    assert configs.resolve(raw)["transforms"] == {"clip_norm": {"max_norm": 2.0}}
    raw = {**raw, "methods": {"with": {}, "without": {"transforms": []}}}
    both = {name: configs.resolve(one) for name, one in configs.methods(raw).items()}
    assert both["with"]["transforms"] == {"clip_norm": {"max_norm": 2.0}}
    assert both["without"]["transforms"] == {}


def test_functions_of_a_user_are_transforms(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from fedjax_peft.transforms import clip_norm\n\n"
        "def halves(max_norm=0.5):\n    return clip_norm(max_norm)._replace(name='halves')\n"
    )
    (tmp_path / "run.toml").write_text('rounds = 1\ntransforms = ["mine.py:halves"]\n')
    config = configs.load(tmp_path / "run.toml")
    config = configs.resolve(small(**config))
    assert config["transforms"] == {f"{tmp_path}/mine.py:halves": {"max_norm": 0.5}}
    assert [one.name for one in configs.build(config, "transforms")] == ["halves"]


@pytest.mark.parametrize("name", ["mine.py:halves", "mine:halves", "sub.mine:halves"])
@pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
def test_options_of_a_user_s_transform_are_overridden_and_swept(tmp_path, monkeypatch, name, here):
    folder = tmp_path / "sub" if name.startswith("sub") else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(
        "from fedjax_peft.transforms import clip_norm as clip\n\n"
        "def halves(max_norm: float = 0.5):\n    return clip(max_norm)._replace(name='halves')\n"
    )
    (tmp_path / "run.toml").write_text(f"transforms = [{name!r}]\n")
    if here:
        monkeypatch.chdir(tmp_path)
    raw, whole = small(**configs.load(tmp_path / "run.toml")), f"{folder}/mine.py:halves"
    for text in (f"transforms.{name}.max_norm=2.0", f"transforms.{name}={{max_norm=2.0}}"):
        found = configs.resolve(configs.methods(raw, [text])[""])
        assert found["transforms"] == {whole: {"max_norm": 2.0}}
        assert configs.methods({**raw, **found}, [text.partition("=")[0] + "="])
    planned = sweeps.plan(raw, [f"transforms.{name}.max_norm=1.0,2.0"])
    assert [point.folder for point in planned.points] == ["max_norm=1.0", "max_norm=2.0"]
    assert planned.keys == [f"transforms.{whole}.max_norm"]
    made = [made_from_values(point.config) for point in planned.points]
    assert made[0]["transforms"] == made[1]["transforms"]
    assert made[0]["transforms"](made[1]["values"])[0].name == "halves"


test_wrong_transforms_of_a_config_are_named = refusals(
    lambda given: configs.resolve(small(transforms=given)),
    ("clip_nrm", "There is no transform 'clip_nrm'. Did you mean 'clip_norm'"),
    (["clip_norm"], r"The config key \[transforms.clip_norm\] 'max_norm' is missing"),
    ({"clip_norm": {"norm": 1.0}}, r"Unknown config key \[transforms.clip_norm\] 'norm'"),
    ({"clip_norm": 1.0}, "it must be a table of the options of 'clip_norm'"),
    (1, r"\[transforms\] must be a table or a name"),
)


def test_transforms_are_listed_and_explained():
    text = explain.explain("transforms")
    assert re.search(r"\[transforms.NAME\] for one of\n  clip_norm +Scales", text)
    text = explain.explain_function("transforms", "clip_norm")
    assert "[transforms.clip_norm]" in text
    assert "max_norm: number above 0, or inf, must be given" in text
    assert "max_norm" in explain.explain("transforms.clip_norm.max_norm")
