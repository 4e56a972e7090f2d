"""``experiments/verdicts.py`` against a slow implementation of the rule in ``claims.toml``."""

import itertools
import re
import runpy
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from closeness import approx
from made_runs import read_table
from refusals import refused
from scipy import stats
from significance import holm, p_value

import fedjax_peft as fp

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments"
PAGE = ROOT / "docs" / "explanation" / "claims.md"
SCRIPT = runpy.run_path(str(FOLDER / "verdicts.py"))
CLAIMS = tomllib.loads((FOLDER / "claims.toml").read_text())["claim"]
INTERVAL = re.compile(r"[-−+]\d+\.\d \[[-−+]\d+\.\d, [-−+]\d+\.\d\]")


def outcome(s, side, where):
    """Seed -> the mean of the rows of a method that a setting names."""
    table = pd.read_csv(FOLDER / s["runs"], dtype=str, keep_default_na=False)
    wanted = {s.get("by", "method"): s["difference"][side], **where}
    if "rates" in s:
        wanted[s.get("rate", "rate")] = s["rates"][side]
    for column, value in wanted.items():
        ways = value if isinstance(value, list) else [value]
        keep = [
            any(fnmatchcase(x, w) if isinstance(w, str) else float(x) == w for w in ways)
            for x in table[column]
        ]
        table = table[keep]
    numbers = table[s.get("metric", "test_accuracy")].astype(float)
    return numbers.groupby(table["seed"].astype(int)).mean()


def differences(s):
    """The differences of a setting, one for each seed; None if a declared one has not all runs."""
    if not (FOLDER / s["runs"]).exists():
        return None
    a, b = (outcome(s, side, s.get("where", {})) for side in (0, 1))
    if "less" in s:
        a, b = (x - outcome(s, side, s["less"]) for side, x in enumerate((a, b)))
        a, b = a.dropna(), b.dropna()  # seeds that one end lacks
    if not {*s["seeds"]} <= {*a.index} & {*b.index}:
        return None
    a, b = a[s["seeds"]].to_numpy(), b[s["seeds"]].to_numpy()
    return 100 * (a - b) / b if s.get("ratio") else s.get("scale", 100) * (a - b)


def by_all_subsets(ps):
    """Holm's p-values, as the closure of Bonferroni's tests: every subset of the family."""
    found = []
    for i in range(len(ps)):
        others = [p for k, p in enumerate(ps) if k != i]
        sets = (s for n in range(len(others) + 1) for s in itertools.combinations(others, n))
        found.append(max(min(1.0, (len(s) + 1) * min(ps[i], *s, 1.0)) for s in sets))
    return found


def judged(claim):
    """The expected verdict, n, ends and corrected p of each setting of a claim."""
    fixed = {"counted": "counted", "circular": "circular", "lost": "not checked"}
    fixed |= {"stopped": "not decided", "waits": "not decided"}
    rows, ps, member = [], [], []
    for s in claim["setting"]:
        word = next((word for field, word in fixed.items() if field in s), "")
        word = "–" if "beside" in s else word
        found = differences(s) if "runs" in s else None
        row, p = {"verdict": word, "n": s.get("n", 0)}, 1.0
        if found is not None:
            row |= {"n": len(found), "difference": found.mean()}
            if len(found) > 1:
                test = stats.ttest_1samp(found, 0.0)
                row["low"], row["high"] = test.confidence_interval(0.95)
                p = float(test.pvalue)
            row["verdict"] = word if len(found) > 1 else word or "one seed"
        elif "runs" in s:
            assert "declared" in s, s["name"]
            row["verdict"] = "declared, not yet run"
        if row["verdict"] not in ("–", "one seed", "counted", "circular"):
            member.append(len(rows))
            ps.append(1.0 if row["verdict"] else p)
        rows.append(row)
    for i, p in zip(member, by_all_subsets(ps), strict=True):
        row, margin = rows[i], claim["setting"][i].get("margin", 0)
        if row["verdict"]:
            continue
        within = -margin <= row["low"] and row["high"] <= margin
        right = np.sign(row["difference"]) == claim["sign"]
        kinds = [("holds", p < 0.05 and right), ("opposite", p < 0.05), ("equivalent", within)]
        order = kinds if claim["sign"] else [kinds[2], kinds[1]]
        row["p"] = p
        row["verdict"] = next((word for word, is_so in order if is_so), "not seen")
    return rows


@pytest.fixture(scope="module")
def expected():
    """Every setting with the claim's id, its name and the expected row, in the file's order."""
    return [
        {"claim": claim["id"], "text": claim["text"], "setting": s["name"], **row}
        for claim in CLAIMS
        for s, row in zip(claim["setting"], judged(claim), strict=True)
    ]


def test_the_committed_verdicts_follow_from_the_committed_runs(expected):
    made = read_table(FOLDER / "results" / "verdicts.csv")
    assert len(made) == len(expected)
    for row, own in zip(made, expected, strict=True):
        told = {key: row[key] for key in ("claim", "text", "setting", "verdict")}
        assert told == {key: own[key] for key in told}
        assert int(row["n"]) == own["n"]
        for key in ("difference", "low", "high", "p"):
            if key in own:
                assert float(row[key]) == approx(own[key], rel=1e-6), (own["setting"], key)
    assert len({one["verdict"] for one in expected}) > 5


def test_the_counted_bytes_are_those_of_the_table():
    made = read_table(FOLDER / "fedadapters" / "results" / "equations_1_2.csv")
    size = {row["Method"]: float(row["Ours MiB"].replace(",", "")) for row in made}
    less = 100 * (1 - size["GPT-2, LoRA"] / size["GPT-2, Full fine-tuning"])
    (row,) = [x for x in read_table(FOLDER / "results" / "verdicts.csv") if x["claim"] == "bytes"]
    assert row["words"] == f"{less:.1f} % less"


def numbers(row):
    """The words of a difference, from its numbers."""
    ends = f" [{row['low']:+.1f}, {row['high']:+.1f}]" if "low" in row else ""
    return f"{row['difference']:+.1f}{ends}".replace("-", "−")


def rows_of(page):
    """The cells of the rows between the marks of a page."""
    text = page.read_text().split("verdicts: begin -->")[1].split("<!-- verdicts: end")[0]
    lines = text.strip().splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_page_has_the_word_and_the_numbers_of_each_setting(expected):
    shown = [one for one in expected if one["verdict"] != "–"]
    for cells, own in zip(rows_of(PAGE), shown, strict=True):
        assert cells[1] == own["setting"]
        assert cells[4] == f"**{own['verdict']}**", own["setting"]
        if "difference" in own:
            assert cells[2].removesuffix(" %") == numbers(own)
            assert cells[3] == str(own["n"])


def test_the_readme_counts_the_verdicts_of_each_claim(expected):
    for (text, words), claim in zip(rows_of(FOLDER / "README.md"), CLAIMS, strict=True):
        assert text == claim["text"]
        counted = re.findall(r"\*\*(.*?)\*\* (\d+)", words)
        own = [x["verdict"] for x in expected if x["claim"] == claim["id"]]
        assert {word: int(n) for word, n in counted} == {
            word: own.count(word) for word in own if word != "–"
        }


def test_all_files_are_what_the_script_writes(monkeypatch, tmp_path):
    SCRIPT["main"](["--check"])
    text = PAGE.read_text()
    for old, new in (("| **holds**", "| **not seen**"), ("+1.9 [+0.5", "+1.9 [+0.6")):
        changed = tmp_path / "claims.md"
        changed.write_text(text.replace(old, new, 1))
        changed.with_suffix(".svg").write_text(PAGE.with_suffix(".svg").read_text())
        monkeypatch.setitem(SCRIPT["main"].__globals__, "PAGE", changed)
        with pytest.raises(fp.InputError, match="is not what"):
            SCRIPT["main"](["--check"])


def test_intervals_of_the_texts_are_those_of_committed_tables():
    """With either sign: a page may say "A minus B" where a table has "B − A"."""
    known = {FOLDER / "results" / "verdicts.md", *FOLDER.glob("*/results/**/*.md")}
    known |= {FOLDER / name / "README.md" for name in ("fra", "llm", "fedadapters", "federa")}
    plain = [path.read_text().replace("\\", "").replace("−", "-") for path in known]
    there = {tuple(map(float, re.findall(r"[-+]\d+\.\d", x))) for t in plain for x in found(t)}
    readme = (FOLDER / "README.md").read_text().split("## The papers' claims")[1]
    for text in (PAGE.read_text(), readme.split("## Folders")[0]):
        for x in found(text.replace("−", "-")):
            mean, low, high = map(float, re.findall(r"[-+]\d+\.\d", x))
            assert {(mean, low, high), (-mean, -high, -low)} & there, x


def found(text):
    """The differences with intervals of a text."""
    return INTERVAL.findall(text)


def made(tmp_path, sign, differences, **fields):
    """The rows of a claim whose first setting has these differences, in points."""
    runs = tmp_path / "runs.csv"
    lines = [f"a,{i},{x / 100}\nb,{i},0" for i, x in enumerate(differences)]
    runs.write_text("method,seed,test_accuracy\n" + "\n".join(lines) + "\n")
    s = {"name": "one", "runs": str(runs), "difference": ["a", "b"], "seeds": [*range(len(lines))]}
    other = {"name": "two", "lost": True, "printed": "+1.0 [+0.5, +1.5]", "n": 3}
    return SCRIPT["decide"]({"id": "x", "text": "x", "sign": sign, "setting": [s | fields, other]})


CLEAR, SMALL, WIDE = [2.0, 2.1, 1.9, 2.05], [0.1, -0.2, 0.15, -0.05], [5.0, -4.0, 3.0, -1.0]


@pytest.mark.parametrize(
    ("sign", "differences", "fields", "word"),
    [
        (1, CLEAR, {}, "holds"),
        (-1, CLEAR, {}, "opposite"),
        (-1, [-x for x in CLEAR], {}, "holds"),
        (1, CLEAR, {"margin": 3.0}, "holds"),
        (0, CLEAR, {"margin": 3.0}, "equivalent"),
        (0, CLEAR, {"margin": 1.0}, "opposite"),
        (1, SMALL, {"margin": 1.0}, "equivalent"),
        (1, SMALL, {}, "not seen"),
        (1, WIDE, {"margin": 1.0}, "not seen"),
        (1, CLEAR, {"stopped": "why"}, "not decided"),
        (1, CLEAR, {"waits": "why"}, "not decided"),
        (1, CLEAR, {"beside": "why"}, "–"),
        (1, CLEAR, {"beside": "why", "stopped": "why"}, "–"),
        (1, CLEAR[:1], {}, "one seed"),
        (1, CLEAR, {"declared": 1, "seeds": [0, 1, 2, 3, 4]}, "declared, not yet run"),
    ],
)
def test_the_rule(tmp_path, sign, differences, fields, word):
    one, other = made(tmp_path, sign, differences, **fields)
    assert (one.verdict, other.verdict) == (word, "not checked")


def test_settings_without_runs_stay_in_the_family(tmp_path):
    """The lost one counts with p = 1, so that the p of the other is doubled."""
    (one, _) = made(tmp_path, 1, CLEAR)
    assert one.p == approx(2 * stats.ttest_1samp(CLEAR, 0.0).pvalue)
    (beside, _) = made(tmp_path, 1, CLEAR, beside="why")
    assert beside.p is None
    assert beside.difference == approx(np.mean(CLEAR))


def test_a_loss_waits_for_both_ends(tmp_path):
    """A run that has only one end of a difference of differences has no loss."""
    fields = {"declared": 1, "where": {"seed": [0, 1, 2, 3]}, "less": {"seed": [0, 1, 2]}}
    (one, _) = made(tmp_path, 1, CLEAR, **fields)
    assert one.verdict == "declared, not yet run"


def test_several_rates_of_a_setting_are_refused(tmp_path):
    refused("several rates", made, tmp_path, 1, CLEAR, rate="test_accuracy")


def test_runs_that_are_not_complete_are_refused(tmp_path):
    refused("does not have the seeds of 'one'", made, tmp_path, 1, CLEAR, seeds=[0, 1, 7])


def test_p_values_equal_scipy_and_holm_multiplies_them():
    a, b = dict(enumerate([0.5, 0.6, 0.8, 0.7])), dict(enumerate([0.4, 0.55, 0.78, 0.71]))
    expected = stats.ttest_rel([*a.values()], [*b.values()]).pvalue
    assert p_value(a, {**b, 9: 0.0}) == approx(expected), "over the common seeds"
    assert p_value(a, {0: 0.5}) is None
    assert p_value(a, {seed: x - 0.25 for seed, x in a.items()}) is None, "all equal"
    # .01 x 4; .02 x 3; .03 x 2 is as large as that; .9 stays.
    assert holm([0.03, 0.01, 0.9, 0.02]) == approx([0.06, 0.04, 0.9, 0.06])
    assert holm([0.5, 0.6]) == approx([1.0, 1.0])
    assert holm([]) == []
