"""A mutation test: small faults are inserted into the package, and the tests must find each.

    make mutants                                  # the named ones and a sample, about 20 minutes
    python tests/tools/mutants.py --list                # all, one per line
    python tests/tools/mutants.py --only fedrep         # those of files with this in the name
    python tests/tools/mutants.py --sample 0            # only the named ones

Each mutant changes one file of the rooms in ``FOLDERS``, or one of ``FILES``, in a temporary
copy of the repository, and runs the tests of this file: those that ``TESTS`` names, or else those
of its room. General tools (mutmut, cosmic-ray) run the whole suite for each mutant, with minutes of
compilation. This script selects the tests by file, shares a compilation cache, and imports other
libraries once. With ``--log FILE``, a run that was stopped goes on where it was.

A mutant that these tests do not notice meets the cases that only ``make exhaustive`` runs.
Survivors make the exit code 1, except for those in ``EQUIVALENT``, which have no observable effect.
The share of killed mutants is of those killed or survived, so it leaves out equivalent mutants and
those whose tests took too long.
"""

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from fedjax_peft.report.separation import wilson

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("asynchronous", "availability", "data", "simulation")
FOLDERS = (
    *("algorithms", "aggregators", "engine", "numerics/measures", "privacy", "transforms"),
    *SHELL,
)
FILES = (
    *("report/intervals", "report/separation", "report/study", "report/targets"),
    "tasks/sources",
)

PERSONAL = "tests/algorithms/test_algorithms_personal.py"
OPTIMISATION = "tests/algorithms/test_algorithms_optimisation.py"
PRODUCT = "tests/algorithms/test_algorithms_product.py"
LORA = "tests/algorithms/test_algorithms_lora.py"
MCP = "tests/algorithms/test_algorithms_fedmcp.py"
DPA = "tests/algorithms/test_algorithms_feddpa.py"
CORES = "tests/algorithms/test_algorithms_cores.py"
DIRECTIONS = "tests/algorithms/test_algorithms_directions.py"
FACTORS = "tests/algorithms/test_algorithms_lora_2025_factors.py"
ALL = "tests/algorithms/test_algorithms_all.py"
REFUSALS = "tests/algorithms/test_algorithms_refusals.py"
ROWS = "tests/algorithms/test_algorithms_rows.py"
MEANS = "tests/aggregators"

TESTS: dict[str, tuple[list[str], str]] = {
    "algorithms/afl": (
        ["tests/algorithms/test_algorithms_fair.py", ALL],
        "afl or simplex or number",
    ),
    "algorithms/apfl": ([PERSONAL, PRODUCT, ALL], "apfl"),
    "algorithms/centralised": ([PERSONAL, ALL], "centralised or baseline or kept"),
    "algorithms/checks": ([REFUSALS, PERSONAL, MCP], "refus or head or model"),
    "algorithms/common": ([OPTIMISATION, PERSONAL], "slow_reference and partial or fedprox"),
    "algorithms/clustering": (["tests/test_clustering.py"], ""),
    "algorithms/ditto": ([PERSONAL, PRODUCT, ALL], "ditto"),
    "algorithms/fedalt": (["tests/algorithms/test_algorithms_fedalt.py", ALL], "fedalt or world"),
    "algorithms/fedavg": ([PERSONAL, PRODUCT, "tests/engine/test_engine_round.py"], ""),
    "algorithms/fedbabu": ([PERSONAL, ALL], "fedbabu or head"),
    "algorithms/feddpa": ([DPA, ALL], "feddpa or equal or tun or weight"),
    "algorithms/feddyn": ([OPTIMISATION, PRODUCT, ALL], "feddyn or optimum"),
    "algorithms/fedex": ([LORA, ALL], "fedex or exact"),
    "algorithms/fedlease": (["tests/algorithms/test_algorithms_fedlease.py", REFUSALS], ""),
    "algorithms/linkage": (["tests/algorithms/test_algorithms_linkage.py"], ""),
    "algorithms/fedmatch": ([MCP, ALL], "fedmatch"),
    "algorithms/fedmcp": ([MCP], ""),
    "algorithms/fedmomentum": (["tests/algorithms/test_algorithms_fedmomentum.py", ALL], ""),
    "algorithms/fednova": ([OPTIMISATION, ALL], "fednova"),
    "algorithms/fedopt": (
        [ALL, OPTIMISATION, PRODUCT],
        "fedavgm or fedadam or fedyogi or fedadagrad or fedopt or product or hand",
    ),
    "algorithms/fedper": ([PERSONAL, ALL], "fedper or head"),
    "algorithms/fedprox": ([OPTIMISATION, PRODUCT, ALL], "fedprox"),
    "algorithms/fedrep": ([PERSONAL, ALL], "fedrep"),
    "algorithms/fedrot": (["tests/algorithms/test_algorithms_fedrot.py", ALL], ""),
    "algorithms/fedsa": ([LORA, ALL], "fedsa"),
    "algorithms/fedsb": ([CORES, ALL], "fedsb or refused"),
    "algorithms/directions": ([DIRECTIONS], ""),
    "algorithms/fedask": (["tests/algorithms/test_algorithms_fedask.py", ALL], ""),
    "algorithms/fedplora": ([DIRECTIONS, ALL], "fedplora or slow"),
    "algorithms/fslora": ([DIRECTIONS, ALL], "fslora or slow"),
    "algorithms/fedsvd": ([FACTORS, ALL], "fedsvd or svd"),
    "algorithms/ffa": ([LORA, ALL], "ffa and not fra"),
    "algorithms/flora": ([LORA, ALL], "flora or exact"),
    "algorithms/fra_ffa": ([LORA, ALL], "fra_ffa or switch"),
    "algorithms/hetlora": ([LORA, ALL], "hetlora or rank or prun"),
    "algorithms/gossip": ([ROWS, REFUSALS], ""),
    "algorithms/graphs": ([ROWS, REFUSALS], "graph or gossip"),
    "algorithms/hierfavg": ([ROWS, REFUSALS], "hierfavg or cloud or travels or refused"),
    "algorithms/ifca": ([ROWS, REFUSALS], "ifca or refused"),
    "algorithms/rows": ([ROWS], ""),
    "algorithms/hilora": (["tests/algorithms/test_algorithms_hilora.py", ALL], "hilora or slow"),
    "algorithms/keeping": ([ALL, PERSONAL], "keep or kept"),
    "algorithms/local": ([PERSONAL, ALL], "local or baseline or alone or kept"),
    "algorithms/lora_a2": (["tests/algorithms/test_algorithms_lora_a2.py", ALL], ""),
    "algorithms/moon": ([PERSONAL, PRODUCT, ALL], "moon or contrast"),
    "algorithms/pfedlora": (
        ["tests/algorithms/test_algorithms_pfedlora.py", ALL],
        "pfedlora or slow",
    ),
    "algorithms/pfedme": ([PERSONAL, PRODUCT, ALL], "pfedme"),
    "algorithms/probe": ([OPTIMISATION], "scaffold"),
    "numerics/measures/representation": (
        [MCP],
        "similar or pooling or cka or nothing or causal or known",
    ),
    "algorithms/q_fedavg": (["tests/algorithms/test_algorithms_fair.py", ALL], "fair or q_fedavg"),
    "algorithms/received_loss": (["tests/algorithms/test_algorithms_fair.py"], ""),
    "algorithms/ravan": ([CORES, ALL], "ravan"),
    "algorithms/rolora": ([LORA, PRODUCT, ALL], "rolora"),
    "algorithms/slora": ([CORES, ALL], "slora"),
    "algorithms/scaffold": ([OPTIMISATION, PRODUCT, ALL], "scaffold or optimum"),
    "aggregators/fields": ([OPTIMISATION, PRODUCT], "scaffold"),
    "aggregators/flexlora": ([MEANS, PRODUCT], "flex or split"),
    "aggregators/fra": ([MEANS, PRODUCT], ""),
    "aggregators/lora_fair": ([FACTORS], "fair or squares or correction or norm or zeros"),
    **{
        f"aggregators/{file}": ([MEANS], f"{file} or robust")
        for file in (
            "bulyan",
            "centred_clipping",
            "fltrust",
            "geometric_median",
            "krum",
            "median",
            "norm_bounding",
            "ranking",
            "robust",
            "trimmed_mean",
        )
    },
    "aggregators/flora_na": ([MEANS], "flora_na or slow_reference or hand or small or smaller"),
    "aggregators/hetlora": ([MEANS, ALL], "het"),
    "aggregators/ilora": ([MEANS, ALL], "ilora or dense or metrics or zero"),
    "aggregators/mean": ([MEANS, "tests/engine/test_engine_round.py"], ""),
    "aggregators/raflora": ([MEANS, ALL], "raflora or metrics"),
    "aggregators/products": ([PRODUCT], "slow or sgd or nothing or split or without"),
    "engine/devices/distributed": (["tests/test_distributed.py"], ""),
    "engine/differentiable": (["tests/test_differentiable.py"], ""),
    "engine/with_derivative": (["tests/test_differentiable.py"], ""),
    "numerics/measures/aggregation_error": ([MEANS], ""),
    "numerics/measures/diagnosis": (["tests/engine/test_engine_diagnosis.py"], ""),
    "numerics/measures/drift": (["tests/engine/test_engine_diagnosis.py"], ""),
    "numerics/measures/spectrum": (["tests/engine/test_engine_diagnosis.py"], ""),
    "tasks/sources": (
        [f"tests/data/test_data_{x}.py" for x in ("sources", "formats", "instructions")],
        "",
    ),
}
"""File -> its test files, and pytest's ``-k``; a file that is missing has the tests of its room."""
_SOURCES = "data_sources data_formats"
_TESTS_OF_SHELL = {
    "asynchronous/": "asynchronous_simulate",
    "availability/": "availability",
    "data/arrays": "data_sources data_clients data_vocabulary",
    "data/catalog": "data_catalog data_standin",
    "data/classes": "simulation_classes data_combine",
    "data/dataset": "data_dataset data_packing data_validation",
    "data/encode": "data_sources tasks_own",
    "data/encoders/base": "data_validation data_sources",
    "data/encoders/choices": "tasks_multiple_choice data_standin",
    "data/encoders/conversations": "data_templates data_conversations",
    "data/encoders/language": "data_language data_sources",
    "data/encoders/pixels": "data_images data_standin",
    "data/encoders/spans": "data_spans",
    "data/encoders/tags": "data_tagging",
    "data/encoders/text": "data_validation data_sources data_standin",
    "data/formats/": _SOURCES,
    "data/formats/files": f"{_SOURCES} data_catalog data_h5",
    "data/formats/client_lists": "data_conversations",
    "data/formats/conll": "data_formats data_sources",
    "data/formats/glue": "data_catalog data_formats",
    "data/formats/h5": "data_h5",
    "data/formats/images": "data_images",
    "data/formats/leaf": "data_leaf data_h5",
    "data/formats/semeval": "data_catalog",
    "data/formats/squad": "data_formats data_spans",
    "data/held_out": "data_validation",
    "data/heterogeneity": "data_heterogeneity report_partition",
    "data/iob": "data_tagging",
    "data/keys": "data_partition data_sources",
    "data/naming": "data_sources",
    "data/papers": "data_catalog",
    "data/partition/": "data_partition data_partition_all",
    "data/partition/features": "data_images data_partition",
    "data/reading": "data_formats data_conversations data_catalog",
    "data/roles": "data_conversations data_templates",
    "data/subsets": "data_vocabulary data_sources",
    "data/table": "data_validation data_tagging data_formats",
    "data/tokens": "data_sources data_text",
    "data/trees": "data_conversations",
    "simulation/arguments": "simulation_border simulation_simulate",
    "simulation/asynchrony": "asynchronous_simulate",
    "simulation/checks": "simulation_border",
    "simulation/client_models": "simulation_loading",
    "simulation/clock": "simulation_sampling simulation_work simulation_cost availability",
    "simulation/description": "simulation_fingerprint",
    "simulation/estimate": "cli_console simulation_work",
    "simulation/guarantee": "privacy_guarantee",
    "simulation/ledger": "simulation_cost simulation_transforms",
    "simulation/local_models": "simulation_local",
    "simulation/rounds": "simulation_rounds simulation_resume simulation_stopping simulation_work",
    "simulation/turn": "availability",
    "simulation/moment": "simulation_stopping simulation_diagnostics",
    "simulation/planning/": "simulation_memory_plan simulation_devices",
    "simulation/points": "simulation_sweep",
    "simulation/progress": "simulation_progress cli_console",
    "simulation/records": "simulation_spelling simulation_border",
    "simulation/round_rows": "simulation_diagnostics engine_session",
    "simulation/run": "simulation_loading simulation_simulate",
    "simulation/session": "simulation_sampling simulation_border privacy_seeds",
    "simulation/simulate": "simulation_simulate simulation_border simulation_interrupts",
    "simulation/stopping": "simulation_stopping simulation_sweep -k stop or patience or median",
    "simulation/storage/calls": "simulation_loading simulation_fingerprint",
    "simulation/storage/checkpoint": "simulation_resume aggregators_state",
    "simulation/storage/client_checkpoints": "simulation_client_store",
    "simulation/storage/earlier": "simulation_loading",
    "simulation/storage/fingerprint": "simulation_fingerprint",
    "simulation/storage/lock": "simulation_lock",
    "simulation/storage/named_data": "simulation_python_config",
    "simulation/storage/record": "simulation_resume simulation_lock",
    "simulation/storage/saver": "simulation_resume simulation_interrupts",
    "simulation/storage/tracking": "simulation_trackers",
    "simulation/summaries": "simulation_rows report_details",
    "simulation/time_model": "simulation_cost simulation_cost_papers",
    "simulation/trackers/": "simulation_trackers",
    "simulation/trained_rows": "simulation_trained_rows config_origins",
}
"""Files, or a folder for those without an entry, of ``SHELL`` -> their tests by short names."""
for _file, (_paths, _) in TESTS.items():
    if _file.startswith("algorithms/") and REFUSALS not in _paths:
        _paths.append(REFUSALS)  # its cases have the names of algorithms


def tests_of(file: str) -> tuple[list[str], str]:
    """Returns the test files of a file, and pytest's ``-k``."""
    folder = f"{file.rpartition('/')[0]}/"
    if file in TESTS or not file.startswith(SHELL):
        return TESTS.get(file) or ([f"tests/{file.split('/')[0]}"], "")
    own = file.replace("/", "_")  # its test file has its name, if there is nothing to say
    named = _TESTS_OF_SHELL.get(file) or _TESTS_OF_SHELL.get(folder) or own
    names, _, chosen = named.partition(" -k ")
    paths = [f"tests/{name.split('_')[0]}/test_{name}.py" for name in names.split()]
    return [path.replace("test_privacy_guarantee", "test_guarantee") for path in paths], chosen


class Mutant(NamedTuple):
    """One changed file."""

    file: str
    """Such as ``algorithms/fedrep``."""
    what: str
    """Line number and change."""
    source: str


NAMED = [
    # Options that an audit found to have no test.
    (
        "algorithms/moon",
        "pool(context.apply(params, batch, None, False), batch, pooling)",
        'pool(context.apply(params, batch, None, False), batch, "mean")',
    ),
    ("algorithms/moon", "pool(outputs, batch, pooling)", 'pool(outputs, batch, "mean")'),
    ("algorithms/fedopt", "nesterov=nesterov", "nesterov=False"),
    (
        "algorithms/pfedme",
        'model=lambda broadcast, client_state: client_state["personal"]',
        'model=lambda broadcast, client_state: {**client_state["personal"], **broadcast}',
    ),
    (
        "algorithms/fedmcp",
        'passes["private" if terms.private_rep == "private_only" else "dual"]',
        'passes["private" if terms.private_rep == "private_only" else "global"]',
    ),
    *[
        (f"algorithms/{name}", "head_roles(head), aggregator)", "head_roles(head))")
        for name in ("fedprox", "moon", "ditto", "pfedme", "apfl", "fedrep")
    ],
    # What a server optimizer over new factors must be told and do.
    ("algorithms/fedopt", "incompatible=incompatible", "incompatible={}"),
    ("aggregators/fra", "refactors=True", "refactors=False"),
    ("aggregators/fra", "truncates=True", "truncates=False"),
    (
        "aggregators/products",
        "Product(changes.pop(a), upload[b])",
        "Product(changes.pop(a), changes[b])",
    ),
    # A step for each part of FedRep; the last real token; gradients' weights.
    ("algorithms/fedrep", "~on_head | single", "~on_head"),
    ("numerics/measures/representation", "if outputs.last is None:", "if True:"),
    ("algorithms/fednova", "made / jnp.where(first == 0, 1.0, first)", "1.0"),
]
"""(file, what it has, what stands there instead)."""

EQUIVALENT: dict[tuple[str, str], str] = {}
"""(file, part of ``what``) -> why no test can tell."""


# ------------------------------------------------------------------------------- making mutants


SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SKIPPED_CALLS = {"InputError", "warn"}
"""Messages are tested by what they name, not word by word."""


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the replacements of a node."""

    def with_(**fields: object) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            yield with_(ops=[SWAPS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in SWAPS:
            yield with_(op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert(), operand=inner):
            yield inner
        case ast.BoolOp(op=ast.Or(), values=[_, second]):
            yield second
        case ast.BoolOp(op=op):
            yield with_(op=SWAPS[type(op)]())
        case ast.IfExp(body=body, orelse=other):
            yield body
            yield other
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
        case ast.Call(func=ast.Attribute(attr="where" | "select"), args=[_, first, second]):
            yield first
            yield second
        case ast.Call(func=ast.Attribute(attr="stop_gradient"), args=[inner]):
            yield inner
        case ast.Dict(keys=[None, None], values=[first, second]):
            yield with_(values=[second, first])


def functions_of(tree: ast.Module) -> list[ast.FunctionDef]:
    """Returns the public functions, whose options must all be used."""
    return [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]


def mutants_of(file: str) -> list[Mutant]:
    """Returns all mutants of a file."""
    source = (ROOT / "fedjax_peft" / f"{file}.py").read_text()
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    found = []

    def replaced(node: ast.AST, new: str) -> str:
        offsets = [0]
        for line in lines:
            offsets.append(offsets[-1] + len(line.encode()))
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[node.end_lineno - 1] + node.end_col_offset
        raw = source.encode()
        return (raw[:start] + new.encode() + raw[end:]).decode()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in SKIPPED_CALLS:
                return
        if inside and isinstance(node, ast.expr):
            for new in changes(node):
                text = f"({ast.unparse(new)})"
                what = f"line {node.lineno}: {ast.unparse(node)} -> {ast.unparse(new)}"
                found.append(Mutant(file, what, replaced(node, text)))
        for name, field in ast.iter_fields(node):
            if name in ("decorator_list", "returns", "annotation"):
                continue
            if isinstance(node, ast.arguments):
                continue  # a default is not a fault
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    visit(child, inside or isinstance(node, ast.FunctionDef))

    visit(tree, False)
    for function in functions_of(tree):
        first = function.body[1] if ast.get_docstring(function) else function.body[0]
        for argument, default in zip(
            function.args.kwonlyargs, function.args.kw_defaults, strict=True
        ):
            if default is None:
                continue
            at = first.lineno - 1
            line = f"    {argument.arg} = {ast.unparse(default)}\n"
            what = f"line {function.lineno}: {function.name} ignores its option {argument.arg}"
            found.append(Mutant(file, what, "".join([*lines[:at], line, *lines[at:]])))
    return found


def named() -> list[Mutant]:
    """Returns the mutants of ``NAMED``.

    Raises:
      SystemExit: the code has moved on, and a mutant does not apply any more.
    """
    found = []
    for file, old, new in NAMED:
        source = (ROOT / "fedjax_peft" / f"{file}.py").read_text()
        if old not in source:
            raise SystemExit(f"{file}: the named mutant {old!r} does not apply: adapt it.")
        found.append(Mutant(file, f"named: {old} -> {new}", source.replace(old, new)))
    return found


# ------------------------------------------------------------------------------ running mutants


def prepared(directory: Path) -> Path:
    """Returns a copy of the repository whose tests keep compiled programs from run to run."""
    copy_ = directory / "copy"
    ignore = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy_, ignore=ignore)
    conftest = copy_ / "tests" / "conftest.py"
    lines = [
        f"COMPILED = {str(directory / 'compiled')!r}" if line.startswith("COMPILED = ") else line
        for line in conftest.read_text().splitlines()
        if not line.startswith("atexit.register(")
    ]
    conftest.write_text("\n".join([*lines, ""]))
    return copy_


KILLED, EXHAUSTIVE, SURVIVED = "killed", "killed by the exhaustive cases only", "SURVIVED"


LIBRARIES = ("flax.nnx", "optax", "pandas", "pytest", "scipy.stats")
"""What most tests import; imported once, because that takes longer than many tests."""


def _test(copy_: Path, arguments: list[str]) -> NoReturn:
    """Runs pytest on a copy of the repository, in a process that has the libraries already."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.chdir(copy_)
    os.environ["PYTHONPATH"] = str(copy_)
    here = {str(ROOT), *(str(ROOT / "tests" / x) for x in ("helpers", "tools")), ""}
    sys.path[:] = [str(copy_), *(path for path in sys.path if path not in here)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedjax_peft"]:
        del sys.modules[name]
    try:
        code = int(importlib.import_module("pytest").main(arguments))
    except BaseException:
        code = 1
    os._exit(code)


def put(target: Path, source: str) -> None:
    """Writes a module, and removes its bytecode, which may be as new and as long as the other."""
    target.write_text(source)
    for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        stale.unlink()


def passes(copy_: Path, file: str, limit: float, exhaustive: bool = False) -> bool | None:
    """Returns whether the tests of a file pass, None if they take longer than ``limit`` seconds.

    Args:
      copy_: the copy of the repository.
      file: such as ``algorithms/fedrep``.
      limit: in seconds.
      exhaustive: run only the cases that ``make test`` leaves out; a file without any passes.
    """
    paths, chosen = tests_of(file)
    arguments = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    arguments += ["-o", "file_seconds=0"]  # a slow test must not count as a failure
    arguments += [*paths, *(["-k", chosen] if chosen else [])]
    arguments += ["--exhaustive", "-m", "exhaustive"] if exhaustive else []
    child = os.fork()
    if not child:
        _test(copy_, arguments)
    began = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.1)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 5:  # no tests
        assert exhaustive, f"{file}: -k {chosen!r} chooses no test"
    return code in (0, 5)  # an error of collection is a killed mutant


def sample(mutants: list[Mutant], size: int, seed: int) -> list[Mutant]:
    """Returns some of the mutants, spread evenly over the files."""
    rng = random.Random(seed)
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    for some in by_file.values():
        rng.shuffle(some)
    rounds = max(map(len, by_file.values()), default=0)
    files = rng.sample(sorted(by_file), len(by_file))
    turns = [by_file[f][i] for i in range(rounds) for f in files if i < len(by_file[f])]
    return turns[:size]


def read_log(path: Path | None) -> dict[str, str]:
    """Returns mutant -> its state of the runs before; of several, the last one."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {name: state for state, _, name in (line.partition("\t") for line in lines)}


def main() -> int:
    """Runs mutants; returns 1 if one survived that is not in ``EQUIVALENT``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="files whose name contains this, or one of a,b,c"
    )
    parser.add_argument("--sample", type=int, default=40, help="how many beside the named ones")
    parser.add_argument("--no-named", action="store_true", help="leave the named ones out")
    parser.add_argument("--all", action="store_true", help="every mutant: takes hours")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--budget", type=float, default=1200, help="seconds after which it stops")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    parser.add_argument(
        "--no-baseline",
        dest="baseline",
        action="store_false",
        help="trust that the tests pass without a mutant, and leave exhaustive cases out",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--log", type=Path, help="a file of outcomes; what it has is not run again")
    a = parser.parse_args()
    inside = [
        str(path.relative_to(ROOT / "fedjax_peft").with_suffix(""))
        for folder in FOLDERS
        for path in (ROOT / "fedjax_peft" / folder).rglob("*.py")
        if path.stem != "__init__"
    ]
    files = sorted([*inside, *FILES])
    assert set(TESTS) <= set(files), f"TESTS names files that are gone: {set(TESTS) - set(files)}"
    gone = {path for file in files for path in tests_of(file)[0] if not (ROOT / path).exists()}
    assert not gone, f"these tests are gone: {gone}"
    files = [f for f in files if any(part in f for part in a.only.split(","))]
    made = [m for file in files for m in mutants_of(file)]
    chosen = made if a.all else sample(made, a.sample, a.seed)
    if not a.no_named:
        chosen = [m for m in named() if m.file in files] + chosen
    print(f"{len(made)} mutants in {len(files)} files; {len(chosen)} are run", flush=True)
    if a.list:
        for mutant in chosen:
            print(f"{mutant.file}: {mutant.what}")
        return 0
    for name in LIBRARIES:
        importlib.import_module(name)
    known = read_log(a.log)
    states = Counter(known[name] for m in chosen if (name := f"{m.file}: {m.what}") in known)
    chosen = [m for m in chosen if f"{m.file}: {m.what}" not in known]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        copy_, sound = prepared(Path(directory)), []

        def check_baseline(file: str, exhaustive: bool = False) -> None:
            tests = (tests_of(file), exhaustive)  # many files share their tests
            if a.baseline and tests not in sound:
                unchanged = passes(copy_, file, 3 * a.limit, exhaustive)
                assert unchanged, f"the tests of {file} fail without a mutant"
                sound.append(tests)

        for n, mutant in enumerate(chosen, 1):
            if time.perf_counter() - began > a.budget:
                print(f"The budget is spent after {n - 1} mutants.")
                break
            target = copy_ / "fedjax_peft" / f"{mutant.file}.py"
            original = target.read_text()
            check_baseline(mutant.file)
            put(target, mutant.source)
            started = time.perf_counter()
            passed = passes(copy_, mutant.file, a.limit)
            put(target, original)
            reasons = [
                why
                for (file, part), why in EQUIVALENT.items()
                if file == mutant.file and part in mutant.what
            ]
            state = {True: SURVIVED, False: KILLED, None: "too slow"}[passed]
            if passed and reasons:
                state = "equivalent"
            elif passed and a.baseline:
                check_baseline(mutant.file, exhaustive=True)
                put(target, mutant.source)
                if passes(copy_, mutant.file, a.limit, exhaustive=True) is False:
                    state = EXHAUSTIVE
                put(target, original)
            states[state] += 1
            seconds = time.perf_counter() - started
            print(f"{n:4} {seconds:5.0f} s  {state:9} {mutant.file}: {mutant.what}", flush=True)
            if a.log:
                with a.log.open("a") as log:
                    log.write(f"{state}\t{mutant.file}: {mutant.what}\n")
            if state == "equivalent":
                print(f"                 {reasons[0]}")
    print("; ".join(f"{count} {state}" for state, count in states.items()))
    killed = states[KILLED] + states[EXHAUSTIVE]
    if judged := killed + states[SURVIVED]:
        low, high = wilson(killed / judged, judged)
        print(f"{killed / judged:.1%} killed, 95 % interval {low:.1%} to {high:.1%}")
    return 1 if states[SURVIVED] else 0


if __name__ == "__main__":
    sys.exit(main())
