"""Prints how many lines and branches of each room of the package the tests run.

    make coverage                          # the whole suite
    make coverage TESTS=tests/transforms   # a part
    .venv/bin/python -m coverage report -m # then: the lines that no test ran

JAX traces a function once: its lines are run, whatever the values. `make mutants` is stricter.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path

import coverage

COLUMNS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def by_room(files: dict[str, dict]) -> dict[str, Counter[str]]:
    """Returns the counts of each room, from the ``files`` of coverage's JSON report."""
    rooms: dict[str, Counter[str]] = {}
    for name, found in files.items():
        _, _, inside = Path(name).as_posix().rpartition("fedjax_peft/")
        room = inside.split("/")[0] if "/" in inside else "(others)"
        for counts in (rooms.setdefault(room, Counter()), rooms.setdefault("all", Counter())):
            counts.update({column: found["summary"][column] for column in COLUMNS})
    all_ = rooms.pop("all", Counter())
    return {**dict(sorted(rooms.items())), "all": all_}


def main() -> None:
    """Combines the files of all processes and prints the table."""
    measured = coverage.Coverage()
    measured.load()
    measured.combine()
    measured.save()
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "coverage.json"
        measured.json_report(outfile=str(report))
        files = json.loads(report.read_text())["files"]
    print(f"{'room':14} {'lines':>15} {'':7} {'branches':>15}")
    for room, counts in by_room(files).items():
        lines, statements, taken, branches = (counts[column] for column in COLUMNS)
        print(
            f"{room:14} {lines:7}/{statements:<7} {lines / max(statements, 1):7.1%} "
            f"{taken:7}/{branches:<7} {taken / max(branches, 1):7.1%}"
        )


if __name__ == "__main__":
    main()
