"""Writes the preferences of the small experiment, and the random base that is tuned on them.

    python experiments/llm/preferences.py --out runs/llm/preferences

A prompt has a colour, and asks for it in capitals or in small letters. The chosen answer does what
the prompt asks for, and the rejected one the opposite. So before training the reward accuracy
is about that of a coin, and a model that reads the request reaches 100 %. ``request`` is a key
to partition by. The base has random weights, and one token for each byte.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import fedjax_peft as fp

COLOURS = [
    "red",
    "green",
    "blue",
    "white",
    "black",
    "pink",
    "brown",
    "grey",
    "orange",
    "purple",
    "yellow",
    "violet",
]
THINGS = [
    "car",
    "house",
    "tree",
    "coat",
    "door",
    "lamp",
    "book",
    "chair",
    "bird",
    "boat",
    "wall",
    "shoe",
]
BASE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def rows_of(rng: np.random.Generator, count: int) -> list[dict]:
    """Returns rows in random order, half of them of each request."""
    rows = []
    for i in rng.permutation(count):
        capitals, colour = bool(i % 2), str(rng.choice(COLOURS))
        how, answers = "capitals" if capitals else "small letters", [colour, colour.upper()]
        prompt = f"A {colour} {rng.choice(THINGS)}. Say its colour in {how}."
        chosen, rejected = answers[capitals], answers[not capitals]
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected, "request": how})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Writes ``train.jsonl``, ``validation.jsonl``, ``test.jsonl`` and the folder ``base``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--train", type=int, default=1600, help="training rows")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    fp.testing.write_tiny_language_model(args.out / "base", **BASE)
    rng = np.random.default_rng(0)
    for split, count in {"train": args.train, "validation": 100, "test": 200}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows_of(rng, count))
        (args.out / f"{split}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
