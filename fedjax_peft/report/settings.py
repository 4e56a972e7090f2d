"""Settings of several runs side by side, and the commands that repeat the runs."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_peft.report.columns import Frame, texts
from fedjax_peft.report.records import RunRecord, is_whole
from fedjax_peft.report.wording import MISSING
from fedjax_peft.support.display import argument, printable
from fedjax_peft.support.nested import flatten


class Settings(NamedTuple):
    """Settings of several runs, by dotted key."""

    differing: list[tuple[str, list[str]]]
    """Key and one value for each run."""
    shared: list[tuple[str, str]]
    """Key and the common value."""

    @property
    def many(self) -> bool:
        """Whether the differing settings are rows of a table, and not columns."""
        return len(self.differing) > _MOST_COLUMNS

    def frame(self, head: str, names: Sequence[str]) -> Frame:
        """Returns the differing settings as a table.

        Args:
          head: what a run stands for.
          names: the names of the runs.
        """
        keys = [key for key, _ in self.differing]
        values = [one for _, one in self.differing]
        if self.many:
            head, names, keys = "Setting", keys, list(names)
            values = [list(one) for one in zip(*values, strict=True)]
        pairs = zip(keys, values, strict=True)
        return Frame(head, names, [texts(key, one, is_text=True) for key, one in pairs])


_MOST_COLUMNS = 6


def compare_settings(settings: Sequence[Mapping[str, Any]]) -> Settings:
    """Returns the settings that differ between runs, and those that all runs share."""
    flat = [printed(one) for one in settings]
    out = Settings([], [])
    for key in dict.fromkeys(itertools.chain(*flat)):
        values = [one.get(key, MISSING) for one in flat]
        if len(set(values)) == 1:
            out.shared.append((key, values[0]))
        else:
            out.differing.append((key, values))
    return out


def printed(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns dotted key -> printed value."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in flatten(settings).items()
    }


def repeating(runs: Sequence[RunRecord]) -> list[str]:
    """Returns the commands that repeat runs, or a sentence if a config does not say everything."""
    if not all(is_whole(run.config) for run in runs):
        return ["# Run the programs that made these runs again: the configs do not say everything."]
    commits = {run.environment.get("commit") for run in runs} - {None}
    lines = [f"git checkout {commit}" for commit in commits if len(commits) == 1]
    for run in runs[:_MOST_COMMANDS]:
        path = printable(str(run.path))
        config, out = argument(f"{path}/config.toml"), argument(f"{path}-again")
        lines.append(f"fedjax-peft run {config} --out {out}")
    if more := len(runs) - _MOST_COMMANDS:
        lines += [f"# {more} more, each from the config.toml of its folder"] if more > 0 else []
    return lines


_MOST_COMMANDS = 12
