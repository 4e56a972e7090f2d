"""How instruction tuning in a federation changes the answers of a small language model.

    python experiments/llm/figures.py runs/llm/sweep --data runs/llm/instructions --out DIR
    python experiments/llm/figures.py runs/llm/methods --data runs/llm/instructions --out DIR

Writes ``exact_match`` (PNG, SVG, PDF, and its data as CSV), ``by_task`` (Markdown, CSV, LaTeX) and
``answers.md``, the answers to some prompts before and after. For the table, the final models answer
all test prompts again. With several methods, each has the learning rate that the sweep chose on
validation, and ``differences`` shows them beside FedAvg. With one seed, the table's differences are
paired by prompt.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fedjax_peft as fp
from fedjax_peft.report.figure_files import PALETTE, save, style, subplots
from fedjax_peft.report.intervals import LEVEL, student
from fedjax_peft.report.study import Cell, paired, read_study, summarise
from fedjax_peft.report.table_files import TextTable
from fedjax_peft.tasks.text_scores import exact_match

sys.path.append(str(Path(__file__).parents[1]))
import paper

METHODS = {
    "fedavg": "FedAvg over LoRA",
    "ffa": "FFA-LoRA",
    "fra": "FRA-LoRA",
    "lora_fair": "LoRA-FAIR",
    "fedsvd": "FedSVD",
    "fedex": "FedEx-LoRA",
    "federa": "FeDeRA",
}
"""Another method of a sweep has its line here."""
SUBJECTS = "religion, computers, for sale, recreation, science, politics"
PROMPTS = {
    "Someone wrote about a film: two hours of pure joy\n"
    "The opinion is positive or negative. Which?": "positive",
    "Someone wrote about a film: dull, loud and far too long\n"
    "The opinion is positive or negative. Which?": "negative",
    f"Choose one of {SUBJECTS} for this text:\n\n"
    "the shuttle reached its orbit an hour after the launch": "science",
    "my new graphics card does not work with this driver under windows\n\n"
    f"Which of these fits best: {SUBJECTS}?": "computers",
    "How are the two marked nouns related?\n\n"
    "The <e1>storm</e1> caused a <e2>flood</e2>.": "Cause-Effect",
    "Find the relation of e1 to e2 in this sentence: He put the <e1>book</e1> into a"
    " <e2>box</e2>.": "Entity-Destination",
}
"""The prompts of ``answers.md``, and the right answers."""
FREQUENT = "always the most frequent answer"
"""The name of the baseline without a model."""
TOKENS = 9
"""The longest answer, as in the config."""

Scores = Mapping[str, float]
"""Task, or ``all`` -> share of exact matches."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(model: fp.Model, params: Any, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a model's answers to the prompts of rows."""
    prompts = [row["messages"][:-1] for row in rows]
    settings: dict[str, Any] = {"template": "chat", "max_new_tokens": TOKENS, "batch_size": 64}
    return fp.generate(model, params, prompts, **settings)


def matches(given: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns 1 for each answer that is right to the word, 0 for the others."""
    pairs = zip(given, rows, strict=True)
    return [float(exact_match(answer, row["messages"][-1]["content"])) for answer, row in pairs]


def shares(right: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> Scores:
    """Returns the share of exact matches of every task, and of all rows."""
    found: dict[str, list[float]] = {"all": [*right]}
    for score, row in zip(right, rows, strict=True):
        found.setdefault(row["task"], []).append(score)
    return {task: float(np.mean(scores)) for task, scores in found.items()}


def most_frequent(
    train: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Returns which rows are right if a task's most frequent answer is always given."""
    counts: dict[str, Counter] = {}
    for row in train:
        counts.setdefault(row["task"], Counter())[row["messages"][-1]["content"]] += 1
    return matches([counts[row["task"]].most_common(1)[0][0] for row in rows], rows)


def draw(cells: Mapping[str, Cell], frequent: float, stem: Path) -> None:
    """Writes the curves: means over seeds and their 95 % t intervals.

    Args:
      cells: method -> its chosen cell.
      frequent: the score of always giving a task's most frequent answer.
      stem: path of the files, without a suffix.
    """
    data: list[dict[str, Any]] = []
    with style():
        fig, ax = subplots(1, 1, size=(4.6, 3.0))
        for color, (name, cell) in zip(PALETTE, cells.items(), strict=False):
            series = cell.series("test_exact_match")
            rounds = next(iter(series.values()))[0]
            values = 100 * np.array([ys for _, ys in series.values()])
            mean = values.mean(axis=0)
            ax.plot(rounds, mean, color=color, label=METHODS[name])
            if len(values) > 1 and len(cells) == 1:  # several bands would cover each other
                half = student(LEVEL, len(values) - 1) * values.std(axis=0, ddof=1)
                half /= np.sqrt(len(values))
                ax.fill_between(rounds, mean - half, mean + half, color=color, alpha=0.2, lw=0)
            data += [
                {"method": name, "seed": seed, "round": t, "test_exact_match": y}
                for seed, (xs, ys) in series.items()
                for t, y in zip(xs, ys, strict=True)
            ]
        line = {"color": "0.4", "linestyle": "--", "linewidth": 1}
        ax.axhline(100 * frequent, label="Always the most frequent answer", **line)
        ax.set(xlabel="Round", ylabel="Exact match (%)", ylim=(0, None))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(loc="lower right")
    save(fig, stem, data)


def draw_differences(scores: Mapping[str, Mapping[Any, Scores]], stem: Path) -> None:
    """Writes the differences from FedAvg, paired by seed, and their 95 % t intervals.

    Args:
      scores: method -> seed -> scores; with ``fedavg``.
      stem: path of the files, without a suffix.
    """
    data: list[dict[str, Any]] = []
    base = {seed: found["all"] for seed, found in scores["fedavg"].items()}
    for name in scores:
        if name != "fedavg":
            found = paired({seed: x["all"] for seed, x in scores[name].items()}, base)
            if found.mean is not None and found.low is not None and found.high is not None:
                interval = {"low": 100 * found.low, "high": 100 * found.high, "seeds": found.n}
                data += [{"method": METHODS[name], "points": 100 * found.mean, **interval}]
    if not data:
        return  # an interval needs two seeds
    with style():
        fig, ax = subplots(1, 1, size=(4.6, 0.6 + 0.35 * len(data)))
        for i, row in enumerate(data):
            ax.plot([row["low"], row["high"]], [i, i], "-", marker="|", color=PALETTE[0])
            ax.plot(row["points"], i, "o", color=PALETTE[0])
        ax.axvline(0.0, color="0.4", linestyle="--", linewidth=1)
        ax.set_yticks(range(len(data)), [row["method"] for row in data])
        ax.invert_yaxis()
        ax.set(xlabel="Exact match minus FedAvg's (points, 95 % t interval)")
    save(fig, stem, data)


def table(
    cells: Mapping[str, Cell],
    scores: Mapping[str, Mapping[Any, Scores]],
    fixed: Mapping[str, Any],
    prompts: Mapping[str, Sequence[float]] | None = None,
) -> TextTable:
    """Returns the table of exact matches by task.

    Args:
      cells: method -> its chosen cell.
      scores: method -> seed -> scores.
      fixed: name of a row without seeds -> its scores.
      prompts: of methods with one seed, name of a row -> which prompts it answers rightly. Then
        the differences are paired by prompt.
    """

    def minus(name: str, other: str) -> str:
        if prompts is not None:
            return paired(*(dict(enumerate(prompts[row])) for row in (name, other))).text(100)
        own = {seed: x["all"] for seed, x in scores[name].items()}
        if other in fixed:
            return paired(own, dict.fromkeys(own, fixed[other]["all"])).text(100)
        return paired(own, {seed: x["all"] for seed, x in scores[other].items()}).text(100)

    tasks = list(next(iter(fixed.values())))
    header = ["method", "learning rate", *(f"{task} %" for task in tasks)]
    header += ["minus most frequent, points", "minus FedAvg, points"]
    rows = [
        [name, "-", *(f"{100 * found[task]:.1f}" for task in tasks), "-", "-"]
        for name, found in fixed.items()
    ]
    for name, cell in cells.items():
        rate = cell.learning_rate
        by_seed = {task: {s: x[task] for s, x in scores[name].items()} for task in tasks}
        compared = name != "fedavg" and "fedavg" in scores
        difference = minus(name, "fedavg") if compared else "-"
        parts = [summarise(by_seed[task]).text(100) for task in tasks]
        rows.append([METHODS[name], f"{rate:g}", *parts, minus(name, FREQUENT), difference])
    over, by = f"mean ± standard deviation over {paper.seeds(cells.values())} seeds", "seed"
    if prompts is not None:
        over, by = "one seed", "prompt"
    note = (
        f"Exact matches of the final model's answers on the test prompts (greedy), {over};"
        f" differences are paired by {by}, with the 95 % t interval."
    )
    return TextTable("Exact matches by task", header, rows, [note])


def examples(columns: Mapping[str, Sequence[str]]) -> str:
    """Returns Markdown with the answers of models to :data:`PROMPTS`."""
    lines = ["# Answers", "", "To prompts that are in no data set; one seed.", ""]
    for i, (prompt, right) in enumerate(PROMPTS.items()):
        lines += ["```text", prompt, "```", "", f"* right: `{right}`"]
        lines += [f"* {name}: `{' '.join(given[i].split())}`" for name, given in columns.items()]
        lines += [""]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Writes the figure, the table and the examples."""
    parser = paper.arguments(__doc__, "sweep")
    parser.add_argument("--data", required=True, type=Path, help="directory of the instructions")
    a = parser.parse_args(words)
    found = read_study(a.sweep).chosen()
    cells = {name: found[name] for name in METHODS if name in found}
    train, rows = read_rows(a.data / "train.jsonl"), read_rows(a.data / "test.jsonl")
    scores: dict[str, dict[Any, Scores]] = {name: {} for name in cells}
    prompts = {FREQUENT: most_frequent(train, rows)}
    fixed: dict[str, Scores] = {FREQUENT: shares(prompts[FREQUENT], rows)}
    own = [{"messages": [{"role": "user", "content": x}, {}]} for x in PROMPTS]
    shown: dict[str, list[str]] = {}
    for name, cell in cells.items():
        for seed, record in cell.runs.items():
            run = fp.load_run(record.path)
            if not shown:
                start = run.model, run.model.trainable
                shown["the base"] = answers(*start, own)
                fixed = {"the base": shares(matches(answers(*start, rows), rows), rows), **fixed}
            if METHODS[name] not in shown:
                shown[METHODS[name]] = answers(run.trained, run.params, own)
            prompts[name] = matches(answers(run.trained, run.params, rows), rows)
            scores[name][seed] = shares(prompts[name], rows)
    a.out.mkdir(parents=True, exist_ok=True)
    draw(cells, fixed[FREQUENT]["all"], a.out / "exact_match")
    if len(scores) > 1 and "fedavg" in scores:
        draw_differences(scores, a.out / "differences")
    single = all(len(found) == 1 for found in scores.values())
    (a.out / "answers.md").write_text(examples(shown))
    paper.write(table(cells, scores, fixed, prompts if single else None), a.out / "by_task")


if __name__ == "__main__":
    main()
