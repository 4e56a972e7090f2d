"""Where the suite's time goes: a table at the end of a run, and limits that keep it quick.

A test of more than :data:`TEST_SECONDS` needs ``@pytest.mark.long("why")``. The tests of one file
may take ``file_seconds`` of ``pyproject.toml`` together, or what ``long_files`` grants it. A
machine on which all tests together need more than :data:`SUITE_SECONDS` is slow or busy, and the
limits grow by this factor: a test is too long beside the others, not because of the machine.
"""

from collections import Counter

import pytest

TEST_SECONDS = 20
SUITE_SECONDS = 1800
"""What the suite may take, added up over the workers: 15 minutes on two cores."""
SHOWN = 15


def pytest_addoption(parser):
    parser.addini("file_seconds", "what the tests of a file may take together", default="0")
    parser.addini("long_files", "file = seconds, for files that may take longer", type="linelist")


class Timing:
    """Adds up the seconds of tests by file; runs where results are reported."""

    def __init__(self, config):
        self.files: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.long: set[str] = set()
        self.usual = float(config.getini("file_seconds"))
        pairs = (line.split("=") for line in config.getini("long_files"))
        self.granted = {file.strip(): float(seconds) for file, seconds in pairs}

    def pytest_runtest_logreport(self, report):
        self.tests[report.nodeid] += report.duration
        self.files[report.nodeid.split("::")[0]] += report.duration
        if "long" in report.keywords:
            self.long.add(report.nodeid)

    def beyond(self) -> list[str]:
        """Returns a sentence for each test and file that took too long."""
        if not self.usual:
            return []
        slowness = max(1.0, sum(self.files.values()) / SUITE_SECONDS)
        said = [
            f"{test}: {seconds:.0f} s. A test of more than {TEST_SECONDS * slowness:.0f} s needs "
            '@pytest.mark.long("why").'
            for test, seconds in self.tests.items()
            if seconds > TEST_SECONDS * slowness and test not in self.long
        ]
        for file, seconds in self.files.items():
            limit = self.granted.get(file, self.usual) * slowness
            if limit and seconds > limit:
                said.append(f"{file}: {seconds:.0f} s, its limit is {limit:.0f} (pyproject.toml).")
        return said

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.beyond() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        parts: Counter[str] = Counter()
        for file, seconds in self.files.items():
            _, part, *below = file.split("/")
            parts[part if below else "(others)"] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("seconds by part")
        write("  ".join(f"{part} {seconds:.0f}" for part, seconds in parts.most_common()))
        write(f"all {sum(parts.values()):.0f}, the workers added up; the longest files and tests:")
        for found in (self.files, self.tests):
            write("  ".join(f"{name} {seconds:.0f}" for name, seconds in found.most_common(SHOWN)))
        for sentence in self.beyond():
            write(sentence, red=True)


def pytest_collection_modifyitems(items):
    """Refuses ``long`` without a reason."""
    for item in items:
        for marker in item.iter_markers("long"):
            if not (marker.args and str(marker.args[0]).strip()):
                raise pytest.UsageError(f'{item.nodeid}: write @pytest.mark.long("why").')


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not a worker of xdist
        config.pluginmanager.register(Timing(config))
