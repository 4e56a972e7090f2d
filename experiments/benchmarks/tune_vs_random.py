"""Compares ``fp.tune`` with random search: Optuna's TPE sampler against its RandomSampler.

    python experiments/benchmarks/tune_vs_random.py

FedAdam over LoRA on 20 Newsgroups: BERT-tiny, 10 clients, Dirichlet(.1), 12 rounds. A search has 24
trials in batches of 4 for three values of FedAdam, with fp.tune's own pruner (medians). The seed
of a search is that of its sampler and of its runs. TPE, too, draws its first ten trials at random.
Declared before the runs: the outcomes are the best validation accuracy after 24 trials, and the
test accuracy of the trial that has it; pairs are by seed. A search takes about three minutes of an
idle core.

Writes results/tune_trials.csv, a row for each trial, and the table results/tune.md and .csv.
Searches that are already in tune_trials.csv are not run again.
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import harness
import optax
import optuna

import fedjax_peft as fp
from fedjax_peft.report.intervals import paired, summarise
from fedjax_peft.report.table_files import TextTable, csv_text

ROUNDS, TRIALS, BATCH = 12, 24, 4
SAMPLERS: dict[str, Any] = {
    "TPE": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),  # fp.tune's
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
}


def space(trial: Any) -> dict[str, float]:
    """Returns the values of a trial: what Reddi et al. (2021) tune."""
    ranges = {"client_rate": (1e-3, 1.0), "server_rate": (1e-3, 1.0), "tau": (1e-5, 1e-1)}
    return {name: trial.suggest_float(name, *ends, log=True) for name, ends in ranges.items()}


def algorithm(point: Any) -> Any:
    """Returns FedAdam with the values of a trial."""
    return fp.algorithms.fedadam(
        optax.sgd(point["client_rate"]),
        server_learning_rate=point["server_rate"],
        tau=point["tau"],
    )


def federation(name: str) -> tuple[fp.Model, fp.Clients, fp.Dataset, fp.Dataset]:
    """Returns model, clients, validation and test data: those of fra/small/exact.toml."""
    data = fp.load_dataset(
        "20newsgroups",
        tokenizer=fp.load_tokenizer(name),
        max_length=32,
        validation_share=0.1,
        validation_examples=500,
        test_examples=1500,
    )
    clients = fp.partition.dirichlet(data["train"], clients=10, alpha=0.1)
    head = fp.heads.classification(data["train"].label_names)
    model = fp.load_model(name, head=head, dropout=0.0)
    return model, clients, data["validation"], data["test"]


def search(
    sampler: str, seed: int, model: Any, clients: fp.Clients, validation: Any, test: fp.Dataset
) -> list[dict[str, Any]]:
    """Returns a row for each trial of a search."""
    given = (fp.attach(model, fp.lora(rank=8), seed=seed), algorithm, clients)
    options: dict[str, Any] = {"rounds": ROUNDS, "sampling": "all", "local_steps": 4, "seed": seed}
    options["evaluation"] = fp.Evaluation(every=3)
    tuned = fp.tune(
        *given,
        space=space,
        choose_by="validation_accuracy",
        trials=TRIALS,
        batch=BATCH,
        study=optuna.create_study(direction="maximize", sampler=SAMPLERS[sampler](seed)),
        validation=validation,
        **options,
    )
    chosen = fp.sweep(*given, points=[tuned.study.best_params], test=test, **options)
    (tested,) = (run.metrics[-1]["test_accuracy"] for run in chosen.runs.values())
    rows, best = [], 0.0
    for trial in tuned.study.trials:
        last = tuned.sweep.runs[trial.user_attrs["run"]].metrics[-1]
        value = round(last["validation_accuracy"], 4)
        best = max(best, value) if trial.state.name == "COMPLETE" else best
        rows.append(
            {"sampler": sampler, "seed": seed, "trial": trial.number + 1}
            | {name: f"{x:.4g}" for name, x in trial.params.items()}
            | {"state": trial.state.name.lower(), "rounds": last["round"]}
            | {"validation_accuracy": value, "best_so_far": best}
            | {"test_accuracy_of_best": round(tested, 4)}
        )
    return rows


def table(rows: list[dict[str, Any]]) -> TextTable:
    """Returns the table of all searches, from the rows of their trials."""
    by_sampler: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_sampler[row["sampler"]][row["seed"]].append(row)
    outcomes = {f"best after {i}": (i - 1, "best_so_far") for i in (8, 12, 16, 20, TRIALS)}
    outcomes["test accuracy of the best"] = (TRIALS - 1, "test_accuracy_of_best")
    values = {
        (name, head): {seed: float(trials[i][field]) for seed, trials in searches.items()}
        for name, searches in by_sampler.items()
        for head, (i, field) in outcomes.items()
    }
    shown = []
    for name, searches in by_sampler.items():
        every = [trial for trials in searches.values() for trial in trials]
        pruned = sum(trial["state"] == "pruned" for trial in every) / len(searches)
        saved = 1 - sum(int(trial["rounds"]) for trial in every) / (ROUNDS * len(every))
        cells = [summarise(values[name, head]).text(100) for head in outcomes]
        shown.append([name, *cells, f"{pruned:.1f}", f"{100 * saved:.0f}"])
    pairs = [paired(values["TPE", head], values["random", head]) for head in outcomes]
    shown.append(["TPE − random", *(pair.text(100) for pair in pairs), "", ""])
    header = ["sampler", *outcomes, "trials pruned", "rounds saved (%)"]
    notes = [
        f"Accuracy in %, mean ± standard deviation over {pairs[0].n} searches with other seeds;"
        " “best after n” is the validation accuracy of the best of the first n trials. Differences"
        " are in points, paired by seed, with the 95 % t interval."
    ]
    return TextTable("TPE and random search, FedAdam on 20 Newsgroups", header, shown, notes)


def main() -> None:
    """Runs the searches that are missing, and writes the table."""
    parser = harness.arguments(__doc__, seeds=3)
    parser.add_argument("--model", default="google/bert_uncased_L-2_H-128_A-2")
    parser.add_argument("--out", type=Path, default=harness.RESULTS)
    options = parser.parse_args()
    file = options.out / "tune_trials.csv"
    rows: list[dict[str, Any]] = []
    if file.exists():
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
    known = {(row["sampler"], int(row["seed"])) for row in rows}
    searches = [(name, seed) for seed in range(options.seeds) for name in SAMPLERS]
    missing = [one for one in searches if one not in known]
    made = federation(options.model) if missing else ()
    for sampler, seed in missing:
        rows += search(sampler, seed, *made)
        file.write_text(csv_text([[*rows[0]], *(list(row.values()) for row in rows)]))
        print(sampler, seed, rows[-1], flush=True)
    found = table(rows)
    (options.out / "tune.md").write_text(found.markdown())
    (options.out / "tune.csv").write_text(found.csv())
    print(found.markdown())


if __name__ == "__main__":
    main()
