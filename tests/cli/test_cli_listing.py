"""``list`` reads names and descriptions from the source: what Python would import, but quickly."""

import subprocess
import sys

import pytest
from internals import config as configs
from internals import registry, source

import fedjax_peft as fp
from fedjax_peft.cli import listing

HEAVY = ("jax", "flax", "optax", "orbax", "pydantic", "transformers", "datasets", "rich")


def test_listing_imports_nothing_heavy():
    """Otherwise ``list`` would take seconds. A search reads every name and description."""
    code = (
        "import sys; from fedjax_peft.cli.main import main; main(['list', 'cluster']);"
        f"print(sorted({{*{HEAVY}}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hilora" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", configs.NAMESPACES.values(), ids=lambda m: m.__name__)
def test_first_lines_that_are_read_are_those_of_the_functions(module):
    documents = {name: getattr(module, name).__doc__.strip() for name in module.__all__}
    first = {name: text.split("\n")[0] for name, text in documents.items()}
    assert {**source.FirstLines(module.__name__)} == first


def test_heads_that_are_read_are_those_of_the_families():
    kinds = {name: family.kinds for name, family in registry.FAMILIES.items()}
    expected = {
        name: [kind for kind in fp.heads.__all__ if kind in own] for name, own in kinds.items()
    }
    assert listing._backbones() == {name: ", ".join(own) for name, own in expected.items()}


def test_an_unknown_name_is_refused():
    with pytest.raises(LookupError, match="no name 'fedvag'"):
        source.find("fedjax_peft.algorithms", "fedvag")
