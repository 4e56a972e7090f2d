"""Presets of published systems: each number is that of the paper, and a config can replace it.

``PAPERS`` is an independent copy of the papers' settings, made from the papers and not from the
file. Every number of the file is compared with it, including those in the texts of
``user_choices``. A file with a changed number must not compare equal.
"""

import copy
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from internals import DATASETS, cli, flatten, presets
from internals import config as configs
from refusals import refusals, refused
from small_config import small

import fedjax_peft as fp
from fedjax_peft import heads, peft, testing

pytestmark = pytest.mark.slow

# -------------------------------------------------------------------------- the papers' settings

FEDMCP = {
    "rounds": 25,
    "epochs": 1,
    "batch_size": 64,
    "optimizer.learning_rate": 0.0005,
    "peft.size": 16,
    "user_choices": {"data.max_length": [128], "data.split": [6, 2, 2]},
}
FRA = {
    "rounds": 30,
    "epochs": 1,
    "model.dropout": 0.2,
    "peft.rank": 16,
    "optimizer.learning_rate": 0.0001,
    "optimizer.weight_decay": 0.005,
    "user_choices": {"local_steps": [5000]},
}
FEDERA = {
    "batch_size": 16,
    "epochs": 1,
    "user_choices": {
        "rounds": [2, 4],  # Tables 2 to 4
        "clients_per_round": [1],
        "partition": [1],
        "data.max_length": [64, 256, 384, 512],
        "optimizer.learning_rate": [0.001, 0.0005, 0.0001, 0.00005, 0.00001],
    },
}
FEDERA_LORA = {**FEDERA, "peft.rank": 32, "peft.alpha": 32}
FLOWERTUNE = {
    "rounds": 200,
    "local_steps": 10,
    "batch_size": 16,
    "data.max_length": 512,
    "peft.rank": 32,
    "peft.alpha": 64,
    "peft.dropout": 0.075,
    "optimizer.learning_rate": 5e-5,
    "optimizer.clip_norm": 1.0,
    "optimizer.weight_decay": 0.0,
    "schedule.final_factor": 0.02,
    "user_choices": {"model": [13]},
}
FEDADAPTERS = {
    "epochs": 5,
    "optimizer.eps": 0.0005,
    "user_choices": {
        "optimizer.learning_rate": [0.005, 0.001, 0.0005, 0.0001, 4.2],  # section 4.2
        "partition": [9, 27, 3, 3],
    },
}
NLP = {**FEDADAPTERS, "rounds": 30, "batch_size": 16}
CV = {**FEDADAPTERS, "rounds": 50, "batch_size": 12}
RECURRENT = {
    **NLP,
    "model.config.embedding_size": 256,
    "model.config.hidden_size": 768,
    "model.config.num_layers": 2,
    "user_choices": {
        **FEDADAPTERS["user_choices"],
        "model.config.vocab_size": [12, 54175],  # Table 12
    },
}
BOTTLENECK = {"peft.reduction_factor": 16}
LORA8 = {"peft.rank": 8, "peft.alpha": 8}
CNN_CHOICES = {**FEDADAPTERS["user_choices"], "model.config.channels": [18.36]}
BASELINE = {"user_choices": {"rounds": [100]}}  # FedPETuning
RANKS = {"peft.rank": 8, "system.client_ranks": [2, 4, 8]}
PAPERS = {
    "fedft": BASELINE,
    "fedlr": {**BASELINE, "peft.rank": 16},
    "fedap": {**BASELINE, "peft.size": 16},
    "fedbf": BASELINE,
    "fedmcp": {**FEDMCP, "algorithm.gamma": 0.5, "algorithm.mu": 0.05},
    "fedmcp/fedft": {k: v for k, v in FEDMCP.items() if k != "peft.size"},
    "fedmcp/local": FEDMCP,
    "fedmcp/fedavg": FEDMCP,
    "fedmcp/fedlr": {**{k: v for k, v in FEDMCP.items() if k != "peft.size"}, "peft.rank": 16},
    "fedmcp/fedap": FEDMCP,
    "fedmcp/moon": FEDMCP,
    "fedmcp/fedrep": {**FEDMCP, "epochs": 2},
    "fedmcp/fedmatch": FEDMCP,
    "fra_lora": FRA,
    "fra_lora/attention": {**FRA, "peft.rank": 8},
    "fra_lora/equal": FRA,
    "fra_lora/fedavg": FRA,
    "fra_lora/ffa": FRA,
    "fra_lora/centralised": FRA,
    "fra_lora/fra_ffa": FRA,
    "federa": FEDERA_LORA,
    "federa/fedlr": FEDERA_LORA,
    "federa/fedap": {**FEDERA, **BOTTLENECK},
    "federa/fedbf": FEDERA,
    "federa/fedft": FEDERA,
    "federa/deberta/federa": FEDERA_LORA,
    "federa/deberta/fedlr": FEDERA_LORA,
    "federa/deberta/fedap": {**FEDERA, **BOTTLENECK},
    "federa/deberta/fedbf": FEDERA,
    "federa/deberta/fedft": FEDERA,
    "fedadapters/text/full": NLP,
    "fedadapters/text/pfeiffer": {**NLP, **BOTTLENECK},
    "fedadapters/text/lora": {**NLP, **LORA8},
    "fedadapters/text/houlsby": {**NLP, **BOTTLENECK},
    "fedadapters/text/rnn": RECURRENT,
    "fedadapters/text/lstm": RECURRENT,
    "fedadapters/images/full": CV,
    "fedadapters/images/pfeiffer": {**CV, **BOTTLENECK},
    "fedadapters/images/lora": {**CV, **LORA8},
    "fedadapters/images/houlsby": {**CV, **BOTTLENECK},
    "fedadapters/images/cnn": {**CV, "user_choices": CNN_CHOICES},
    "flora": {"user_choices": {}},
    "flexlora": {**RANKS, "user_choices": {"peft.alpha": [16]}},
    "raflora": {**RANKS, "user_choices": {}},
    "hetlora": {**RANKS, "user_choices": {}},
    "fedsa": {
        "rounds": 1000,
        "local_steps": 10,
        "batch_size": 128,
        "peft.rank": 8,
        "peft.alpha": 16,
        "peft.dropout": 0.05,
        "optimizer.learning_rate": 0.02,
        "user_choices": {"partition": [3, 0.5]},
    },
    **{
        f"flowertune/{task}": {**FLOWERTUNE, "partition.clients": clients, "clients_per_round": n}
        for task, clients, n in (
            ("general", 20, 2),
            ("finance", 50, 5),
            ("medical", 20, 2),
            ("code", 10, 2),
        )
    },
    "fedex": {"user_choices": {}},
    "rolora": {"user_choices": {}},
}
FEDERATIONS = {
    "20newsgroups": (256, 100, 10, 0.1, 1000),
    "semeval2010_task8": (64, 100, 10, 1, 1000),
    "wnut17": (64, 30, 5, 0.1, 500),
    "ploner": (64, 100, 10, 0.01, 150),
    "squad": (384, 300, 15, 0.1, 100),
    "mrqa": (512, 300, 15, 0.01, 200),
}
"""FeDeRA's Table 1: tokens, clients, clients per round, alpha, rounds."""
SHARES = {"sst2": [[0.9, 0.1], [0.1, 0.9]], "mnli": [[0.7, 0.3], [0.2, 0.8], [0.2, 0.8]]}
"""FRA-LoRA's label skew, by label and client."""
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?(?![\w])", re.ASCII)


def numbers(preset):
    """Returns the numbers of a preset: key -> number, and those in the ``user_choices``."""
    flat = flatten(preset.settings)
    found = {k: v for k, v in flat.items() if isinstance(v, int | float | list) and is_numeric(v)}
    choices = {
        key: [float(x) for x in NUMBER.findall(text)] for key, text in preset.user_choices.items()
    }
    return {**found, "user_choices": {k: v for k, v in choices.items() if v}}


def is_numeric(value):
    if isinstance(value, list):
        return all(is_numeric(x) for x in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def read(monkeypatch, content):
    """Returns the numbers of the presets that a file with this content would define."""
    with monkeypatch.context() as patch:
        patch.setattr(presets, "_file", lambda: content)
        read_again = presets.presets.__wrapped__
        return {name: numbers(preset) for name, preset in read_again().items()}


def test_every_number_is_that_of_the_paper():
    found = {name: numbers(preset) for name, preset in presets.presets().items()}
    assert found.keys() == PAPERS.keys()
    for name, expected in PAPERS.items():
        assert found[name] == expected, name


def mutants(value, path=()):
    """Yields (path, changed value) for every number in a file's content, also within texts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from mutants(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from mutants(inner, (*path, i))
    elif isinstance(value, str) and "user_choices" in path:
        for match in NUMBER.finditer(value):
            yield path, f"{value[: match.start()]}7{match[0]}{value[match.end() :]}"
    elif is_numeric(value):
        yield path, value * 2 + 1


def test_a_change_of_any_number_is_noticed(monkeypatch):
    content = tomllib.loads(presets.FILE.read_text())
    changed = list(mutants(content))
    assert len(changed) > 80
    for path, value in changed:
        other = copy.deepcopy(content)
        node = other
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        assert read(monkeypatch, other) != PAPERS, f"{path} = {value}"


def test_every_number_of_the_file_has_its_source_beside_it():
    for number, line in enumerate(presets.FILE.read_text().splitlines(), 1):
        code, _, comment = line.partition(" #")
        code = re.sub(r'"[^"]*"', "", code)
        if line.startswith(("#", "[")) or "=" not in code:
            continue
        if NUMBER.search(code.split("=", 1)[1]):
            assert len(comment.strip()) >= len("Table 1"), f"line {number}: {line}"


ROBERTA = {"model_type": "roberta", "vocab_size": 50265}
ROBERTA |= {"max_position_embeddings": 514, "type_vocab_size": 1}


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("federa", 1_179_648),  # Table 2: 1.2M
        ("federa/fedlr", 1_179_648),  # 1.2M
        ("federa/fedap", 1_789_056),  # 1.8M
        ("federa/fedbf", 102_144),  # .1M
        ("federa/fedft", 124_055_040),  # 125M
        ("fra_lora", 589_824),  # printed: 1,774,084 with the head counted twice
        ("fra_lora/attention", 589_824),  # the other reading of this number
        ("fedmcp", 2 * 608_640),
        ("fedmcp/fedap", 608_640),
        ("fedmcp/fedlr", 589_824),
    ],
)
@pytest.mark.sample("federa/*", "fedmcp-*", "fra_lora-*")
def test_trainable_parameters_on_roberta_base(name, adapter):
    options = dict(presets.presets()[name].settings["peft"])
    method = getattr(peft, options.pop("name"))(**options)
    counted = fp.count(ROBERTA, method, head=heads.classification(2))
    assert counted["adapter"] == adapter
    assert counted["head"] == 592_130
    if name.startswith("fra_lora"):
        assert counted["adapter"] + 2 * counted["head"] == 1_774_084


# --------------------------------------------------------------------------------- in a config


@pytest.mark.parametrize("name", presets.presets())
def test_every_preset_is_complete(name):
    preset = presets.presets()[name]
    own = {"partition": "centralised", "model": ("rnn", "lstm", "cnn")}
    without = [table for table, ends in own.items() if name.endswith(ends)]
    challenge = name.startswith("flowertune/")
    without += ["data", "partition", "rounds", "local_steps", "batch_size"] * challenge
    config = configs.resolve(small(*without, preset=name))
    for table in configs.NAMESPACES:
        if "name" in preset.settings.get(table, {}):
            assert config[table]["name"] == preset.settings[table]["name"]
    assert configs.resolve(config) == config, "a recorded config resolves to itself"
    assert configs.build_algorithm(config).name
    assert configs.build_method(config).name == preset.settings["peft"]["name"]
    assert len(preset.description) < 90
    assert preset.paper
    assert preset.user_choices


def test_clients_of_fra_lora_can_have_equal_weights():
    """By a preset of its own, and by one key of a config for the paper's other methods."""
    equal = configs.resolve(small(preset="fra_lora/equal"))
    own = configs.resolve(small(preset="fra_lora", algorithm={"weights": "uniform"}))
    assert own["algorithm"] == equal["algorithm"]
    assert configs.build_algorithm(equal).weights == "uniform"
    for name in ("fedavg", "ffa", "fra"):
        raw = configs.load(EXPERIMENTS / "fra" / "paper" / "mnli_skew.toml")
        assert configs.resolve(configs.methods(raw)[name])["algorithm"]["weights"] == "uniform"


def test_the_configs_own_keys_replace_those_of_the_preset():
    config = configs.resolve(small(preset="federa", peft={"rank": 4}))
    assert (config["peft"]["rank"], config["peft"]["init"]) == (4, "svd")
    assert config["optimizer"]["learning_rate"] == 0.1
    assert config["batch_size"] == 16
    assert config["preset_changes"] == {"peft.rank": "32 -> 4"}
    assert configs.resolve(small(preset="federa"))["preset_changes"] is None
    assert configs.resolve(small())["preset_changes"] is None


def test_another_function_does_not_get_the_options_of_the_presets_function():
    config = configs.resolve(small(preset="federa", peft={"name": "opendelta"}))
    assert config["peft"]["name"] == "opendelta"
    assert config["peft"]["init"] != "svd"
    assert config["preset_changes"]["peft.name"] == "lora -> opendelta"


test_unknown_presets_get_the_nearest_names = refusals(
    lambda name: configs.resolve(small(preset=name)),
    ("fedrea", r"no preset 'fedrea'. Did you mean 'federa'"),
    ("federa/fedrl", r"no preset 'federa/fedrl'. Did you mean 'federa/fedlr'"),
    ("houlsby", r"Did you mean 'fedadapters/text/houlsby' or 'fedadapters/images/houlsby'"),
    *((wrong, "There is no preset") for wrong in (["federa"], 3, {"name": "federa"})),
)


def test_missing_keys_get_the_presets_advice():
    for key, message in (
        ("rounds", r"'rounds' is missing.*'federa' you choose.*Tables 2 to 4"),
        ("optimizer", "you choose optimizer.learning_rate: chosen by"),
    ):
        refused(message, configs.resolve, small(key, preset="federa"))


def test_overrides_without_a_value_remove_keys():
    raw = small(preset="federa", peft={"rank": 4, "dropout": 0.1}, batch_size=8)
    resolved = configs.resolve(configs.methods(raw, ["peft.rank=", "batch_size ="])[""])
    assert (resolved["peft"]["rank"], resolved["peft"]["dropout"]) == (32, 0.1)
    assert resolved["batch_size"] == 16
    assert resolved["preset_changes"] is None
    resolved = configs.resolve(configs.methods(raw, ["peft="])[""])
    assert (resolved["peft"]["rank"], resolved["peft"]["dropout"]) == (32, 0)
    raw["methods"] = {"a": {"peft": {"rank": 2}}, "b": {}}
    both = configs.methods(raw, ["methods.a.peft.rank="])
    assert [one["peft"]["rank"] for one in both.values()] == [4, 4], "the value of the file"
    both = configs.methods(raw, ["peft.rank="])
    assert [configs.resolve(one)["peft"]["rank"] for one in both.values()] == [32, 32]
    for text in ("peft.rnk=", "rank=", "methods.a.rank=", "methods.c=", "a.b.c="):
        refused(rf"'{text}' removes .* which does not have it", configs.methods, raw, [text])


def test_an_override_of_one_method_names_it():
    raw = small(methods={"ditto": {"algorithm": "ditto"}, "lr0.1": {}, "lr0": {}})
    texts = ["methods.lr0.1.rounds=3", "methods.lr0.seed=4"]
    one, two, three = configs.methods(raw, texts).values()
    assert (one["rounds"], two["rounds"], three["rounds"], three["seed"]) == (1, 3, 1, 4)
    assert configs.methods(raw, ["methods.more={seed=1}"])["more"]["seed"] == 1
    message = r"is for a method that the config does not have. Did you mean 'ditto'\?"
    for text in ("methods.dito.rounds=3", "methods.dito.algorithm.lam="):
        refused(message, configs.methods, raw, [text])
    refused("There are none", configs.methods, small(), ["methods.ditto.rounds=3"])
    with pytest.raises(fp.InputError, match=r"no \[methods.ditto\]. There are none"):
        configs.only(configs.methods(small()), ["ditto"])


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "", ".."])
def test_a_method_is_a_folder(tmp_path, name):
    (tmp_path / "c.toml").write_text(f'[methods."{name}"]\n')
    refused("choose one without '/'", configs.load, tmp_path / "c.toml")


def test_a_run_prints_and_records_the_settings_that_it_replaced(tmp_path, capsys):
    testing.write_tiny_checkpoint(tmp_path / "model")
    data = {"name": "sst2", "source": "tiny", "max_length": 8, "tokenizer": f"{tmp_path}/model"}
    tables = {"data": data, "model": f"{tmp_path}/model", "local_steps": 1, "peft": {"rank": 2}}
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(small("optimizer", preset="fra_lora/fedavg", **tables)))
    assert cli.main(["run", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "preset 'fra_lora/fedavg': this run's own settings replace the preset's" in printed.err
    assert "rounds 30 -> 1, peft.rank 16 -> 2" in printed.err
    defaults = "does not set these keys, which have their defaults: batch_size (16), peft.al"
    assert defaults in printed.err
    assert "peft.alpha (not set)" in printed.err
    recorded = tomllib.loads(printed.out.partition("\nconfig: ")[0])
    assert recorded["preset_changes"] == {"rounds": "30 -> 1", "peft.rank": "16 -> 2"}


# -------------------------------------------------------------- a paper's partition of a data set


INSTRUCTIONS = {
    # pfl-research, benchmarks/llm/configs. Of Alpaca's 52,002 rows a fifth is the test set; clients
    # have 16 rows.
    "alpaca": ({"name": "iid", "clients": 2600}, 100, 1000),
    "oasst1": ({"name": "natural", "by": "author"}, 100, 1000),
    "aya": ({"name": "natural"}, 100, 1000),
    # FlowerTune's four tasks, and FedLLM-Bench.
    "alpaca_gpt4": ({"name": "iid", "clients": 20}, 2, 200),
    "fingpt_sentiment": ({"name": "iid", "clients": 50}, 5, 200),
    "medical_flashcards": ({"name": "iid", "clients": 20}, 2, 200),
    "code_alpaca": ({"name": "iid", "clients": 10}, 2, 200),
    "fed_aya": ({"name": "natural"}, 4, 200),
}
"""Data set -> partition, clients a round, rounds."""


def test_partitions_are_those_of_the_papers():
    for name, (length, clients, a_round, alpha, rounds) in FEDERATIONS.items():
        settings = DATASETS[name].settings
        assert settings.partition["name"] == "dirichlet"
        assert settings.partition["mode"] == "client_prior"
        found = (settings.partition["clients"], settings.clients_per_round)
        assert found == (clients, a_round), name
        assert (settings.partition["alpha"], settings.rounds) == (alpha, rounds), name
        assert settings.max_length == length
    for name, shares in SHARES.items():
        settings = DATASETS[name].settings
        assert settings.partition == {"name": "label_share", "shares": shares}
        assert (settings.clients_per_round, settings.rounds) == (2, 30)
    silo = DATASETS["glue_silo"].settings
    assert (silo.partition, silo.rounds) == ({"name": "natural", "by": "task"}, 25)
    rounds = {"stack_overflow": 30, "shakespeare": 30, "emnist": 50, "cifar100": 50}
    for name, number in rounds.items():
        settings = DATASETS[name].settings
        assert settings.partition == {"name": "natural", "clients": 9}
        assert (settings.clients_per_round, settings.rounds) == (9, number)
    for name, (partition, a_round, number) in INSTRUCTIONS.items():
        settings = DATASETS[name].settings
        found = (settings.partition, settings.clients_per_round, settings.rounds)
        assert found == (partition, a_round, number), name
    known = {*FEDERATIONS, *SHARES, *rounds, *INSTRUCTIONS, "glue_silo"}
    assert {n for n, one in DATASETS.items() if one.settings.partition} == known


@pytest.mark.parametrize("name", [n for n, one in DATASETS.items() if one.settings.partition])
def test_a_config_takes_the_papers_partition(name):
    raw = small("rounds", data={"name": name}, partition="paper")
    config = configs.resolve(raw)
    settings = DATASETS[name].settings
    assert config["rounds"] == settings.rounds
    assert config["clients_per_round"] == settings.clients_per_round
    for key, value in settings.partition.items():
        assert config["partition"][key] == value
    assert configs.resolve(config) == config
    if name == "squad":
        assert config["data"]["clusters"] == 30
    own = configs.resolve({**raw, "rounds": 3, "partition": {"name": "paper", "seed": 5}})
    assert (own["rounds"], own["partition"]["seed"]) == (3, 5)


def test_the_command_line_takes_the_papers_partition():
    raw = small(data={"name": "wnut17"}, clients_per_round=2)
    (config,) = configs.methods(raw, ["partition=paper", "rounds=", "clients_per_round="]).values()
    config = configs.resolve({**config, "preset": "federa"})
    assert (config["rounds"], config["clients_per_round"]) == (500, 5)
    assert config["partition"]["by"] == "type_set"


def test_a_presets_rounds_replace_those_of_the_data_sets_paper():
    raw = small("rounds", preset="fedsa", data={"name": "mnli"}, partition="paper")
    config = configs.resolve(raw)
    assert (config["rounds"], config["clients_per_round"]) == (1000, 2)
    assert set(config["preset_changes"]) == {"optimizer.learning_rate"}


EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GRID = {
    "federa": {"peft.rank": 32, "peft.init": "svd", "optimizer.weight_decay": 0.0},
    "fra_lora": {"peft.rank": 16, "model.dropout": 0.2, "aggregator.name": "fra"},
    "ffa_lora": {"peft.rank": 16, "model.dropout": 0.2, "algorithm.name": "ffa"},
    "fra_ffa": {"peft.rank": 16, "model.dropout": 0.2, "algorithm.at": 3},
    "fedadapters_pfeiffer": {"peft.reduction_factor": 16, "time.bandwidth_up": 80e6},
    "fedadapters_houlsby": {"peft.reduction_factor": 16, "time.bandwidth_up": 80e6},
    "fedadapters_lora": {"peft.rank": 8, "peft.parts": None, "time.bandwidth_up": 80e6},
    "fedmcp": {"peft.size": 16, "algorithm.gamma": 0.5, "algorithm.mu": 0.05},
    "fedmatch": {"peft.size": 16, "algorithm.name": "fedmatch"},
    "fedlr": {"peft.rank": 16},
    "fedap": {"peft.size": 16},
    "flexlora": {"peft.rank": 8, "system.client_ranks": [2, 4, 8]},
    "hetlora": {"peft.rank": 8, "system.client_ranks": [2, 4, 8], "algorithm.prune": None},
    "fedsa": {"peft.rank": 8, "peft.alpha": 16, "peft.dropout": 0.05},
}
"""Settings of the committed table of experiments/algorithms, made with older presets."""


def test_the_committed_results_have_the_settings_of_their_configs():
    methods = configs.methods(configs.load(EXPERIMENTS / "algorithms" / "minilm.toml"))
    everywhere = {
        **{"rounds": 4, "clients_per_round": 8, "batch_size": 16, "local_steps": 4},
        **{"sampling": "uniform", "partition.clients": 20, "time.preset": "default"},
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 8e-3},
    }
    for name, expected in GRID.items():
        config = configs.resolve(methods[name])
        found = flatten(config)
        expected = everywhere | expected
        assert {key: found.get(key) for key in expected} == expected, name
        time = fp.TimeModel.preset(**config["time"])
        assert (time.seconds_per_step, time.topology, time.transfers) == (0.5, "parallel", ())


@pytest.mark.parametrize("name", ["mrpc", "wnut", "a/folder", None])
def test_data_sets_without_a_papers_partition(name):
    raw = small(data={} if name is None else {"name": name}, partition="paper")
    refused(rf"there is none for {name!r}\. (Known|Did you mean)", configs.resolve, raw)


def test_list_shows_settings_choices_and_partitions(capsys):
    assert cli.main(["list", "preset", "federa/fedlr"]) == 0
    shown = capsys.readouterr().out
    assert "peft.rank = 32" in shown
    assert "  optimizer.learning_rate: chosen by model and data set" in shown
    assert "arXiv:2404.18848" in shown
    assert "fedmcp" not in shown
    assert cli.main(["list", "presets"]) == 0
    shown = capsys.readouterr().out
    for name, preset in presets.presets().items():
        assert f"  {name} " in shown
        assert preset.description in shown
    assert "you choose: rounds, clients_per_round, partition" in shown
    assert cli.main(["list", "data"]) == 0
    shown = capsys.readouterr().out
    line = 'partition = "paper": dirichlet (clients = 30, alpha = 0.1, mode = client_prior,'
    assert line in shown
    assert "5 clients per round, 500 rounds (FeDeRA, Table 1)" in shown
