"""The memory plan: its terms by hand, and its sum beside what the compiler plans."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from closeness import roughly
from internals import abstract_model

import fedjax_peft as fp
from fedjax_peft import aggregators, algorithms, heads, lora, random_model, testing
from fedjax_peft.config import memory
from fedjax_peft.simulation.planning.activations import Activations, activations
from fedjax_peft.simulation.planning.liveness import needed_memory
from fedjax_peft.simulation.planning.memory_plan import (
    MemoryPlan,
    compiled_bytes,
    example_batch,
    plan_memory,
)
from fedjax_peft.simulation.planning.storage import storage_on

pytestmark = pytest.mark.slow

BERT = {**testing.TINY_BERT, "max_position_embeddings": 64, "num_hidden_layers": 1}
LLAMA = testing.TINY_LLAMA
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 261,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 256,
}
BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"
ALGORITHM = algorithms.fedavg(optax.adamw(1e-4))


def parts(shape, **options):
    """Returns the model, algorithm, task and batch of a plan."""
    if shape["model_type"] == "bert":
        head, task = heads.classification(2), fp.tasks.classification()
    else:
        head, task = heads.causal_lm(), fp.tasks.next_token()
    model = abstract_model(shape, lora(4), head=head, **options)
    return model, ALGORITHM, task, example_batch(head.kind, batch_size=8, length=64)


def _lora_numbers(rank, width, key_value, layers):
    """LoRA's parameters on query and value: A [width, rank] and B [rank, outputs] of each."""
    return layers * rank * ((width + width) + (width + key_value))


def test_the_terms_of_a_llama_by_hand():
    rank, width, inner, key_value, layers, words = 4, 32, 64, 16, 2, 261
    model, algorithm, task, batch = parts(LLAMA, dtype="bfloat16")
    plan = plan_memory(model, algorithm, task, batch, clients=10, examples=100)
    matrices = words * width + layers * (2 * width * width + 2 * width * key_value)
    matrices += layers * 3 * width * inner
    norms = (2 * layers + 1) * width  # vectors stay float32
    assert plan.frozen == 2 * matrices + 4 * norms
    trained = 4 * _lora_numbers(rank, width, key_value, layers)
    # The values, both moments and AdamW's count; then the gradient and the new values.
    assert plan.lane == roughly(5 * trained, abs=16)
    assert plan.server == roughly(2 * trained, abs=16)
    # The mean sums the leaves, and the products of LoRA's factors for the aggregation error. The
    # factors of one client are smaller than the matrices, those of five are not.
    products = 4 * layers * (width * width + width * key_value)
    assert trained < products < 5 * trained
    assert plan.uploads == roughly(trained + trained, abs=16)
    five = plan_memory(model, algorithm, task, batch, cohort=5)
    assert five.uploads == roughly(trained + products, abs=32)
    assert plan.clients == 0
    # int32 ids, two masks, and whether the row is the right answer
    assert plan.columns == 100 * (64 * (4 + 1 + 1) + 1)


def test_uploads_without_the_aggregation_error_or_all_at_once():
    model, _, task, batch = parts(BERT)

    def uploads(aggregator, cohort=5):
        algorithm = algorithms.fedavg(optax.sgd(0.1), aggregator=aggregator)
        return plan_memory(model, algorithm, task, batch, cohort=cohort).uploads

    own = sum(4 * x.size for name, x in model.trainable.items() if model.kinds[name] != "fixed")
    assert uploads(aggregators.mean(error=False)) == roughly(own, abs=64)
    assert uploads(aggregators.median(), 7) == roughly(7 * own, rel=0.01)


def test_dequantised_kernels_are_counted_once_for_all_lanes():
    """Those of the gate and of the up projection, which read one array."""
    shape = {**LLAMA, "num_hidden_layers": 1}
    model, algorithm, task, _ = parts(shape, quantize="nf4")
    few = example_batch("causal_lm", batch_size=1, length=4)
    plan = plan_memory(model, algorithm, task, few)
    kernels = 2 * 4 * LLAMA["hidden_size"] * LLAMA["intermediate_size"]
    assert plan.activations.kernels == kernels
    plain, *_ = parts(shape)
    whole = plan_memory(plain, algorithm, task, few)
    assert plan.per_lane == whole.per_lane, "a lane holds no kernel"
    assert plan.fixed - plan.frozen - kernels == whole.fixed - whole.frozen
    again, *_ = parts(shape, quantize="nf4", remat="blocks", scan_layers=True)
    assert plan_memory(again, algorithm, task, few).activations.kernels == kernels


def test_a_client_that_keeps_a_model_counts_once_for_each_client():
    model, _, task, batch = parts(BERT)
    ditto = algorithms.ditto(optax.sgd(0.1))
    few, many = (plan_memory(model, ditto, task, batch, clients=n).clients for n in (1, 7))
    own = [x for name, x in model.trainable.items() if model.kinds[name] != "fixed"]
    assert few == sum(4 * x.size for x in own)
    assert many == 7 * few


def test_recomputed_blocks_leave_their_inputs_alone():
    shape = {**BERT, "num_hidden_layers": 2}
    whole = activations(*parts(shape), platform=H100)
    again = activations(*parts(shape, remat="blocks"), platform=H100)
    hidden = 8 * 64 * BERT["hidden_size"] * 4
    # A block's input is what is kept; the arrays around the blocks come to it.
    assert again.residuals < 8 * hidden < whole.residuals
    # One block's residuals exist while it is computed again.
    assert whole.recomputed == 0 < whole.residuals / 4 < again.recomputed < whole.residuals


def test_the_logits_of_all_positions_are_not_counted():
    shape = {**GPT2, "vocab_size": 70_000}
    found = activations(*parts(shape), platform=H100)
    assert found.largest == (64, 70_000), "one chunk of the loss"


def test_a_chunk_of_the_loss_is_counted_once_on_a_cpu():
    """At the end of a chunk there are two arrays of logits, and which words are the labels."""
    shape = {**GPT2, "vocab_size": 70_000}
    found = activations(*parts(shape))
    assert found.largest == (64, 70_000)
    assert found.working == roughly(64 * 70_000 * (4 + 4 + 1), rel=0.01)
    assert found.residuals < found.working, "the layers are small"


def test_gradients_of_single_rows_start_from_a_constant_that_is_copied():
    """XLA makes the zeros once, outside of the loop over steps."""

    def gradient(rows):
        return jax.vmap(lambda i: jnp.zeros((1000, 32)).at[i].add(1.0))(rows).sum(0)

    program = jax.make_jaxpr(gradient)(jnp.zeros((8, 4), jnp.int32)).jaxpr
    one = 1000 * 32 * 4
    cpu, gpu = (needed_memory(program, x).peak for x in (CPU, H100))
    assert cpu == roughly(2 * 8 * one, rel=0.01)
    assert gpu == roughly(8 * one + one, rel=0.01), "with their sum"


def test_lanes_share_what_does_not_depend_on_them():
    plan = MemoryPlan(100, 10, 3, 30, 50, 5, Activations(2, 2, 1, (1,), kernels=7))
    assert (plan.fixed, plan.per_lane) == (200, 10)
    assert plan.total(3) == 230
    assert [plan.most_lanes(memory) for memory in (150, 209, 210, 299)] == [0, 0, 1, 9]


def test_shapes_and_arrays_have_one_plan():
    model, *rest = parts(BERT)
    real = fp.attach(random_model(BERT, head=heads.classification(2)), lora(4))
    assert plan_memory(real, *rest) == plan_memory(model, *rest)
    assert isinstance(next(iter(real.frozen.values())), jax.Array)


@pytest.fixture
def _optimised():
    """Turns on the optimisations that decide the memory, and that tests otherwise leave out."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


ALGORITHMS = runpy.run_path(str(BENCHMARKS / "planned_algorithms.py"))
COMPILED = json.loads(ALGORITHMS["RESULTS"].read_text())


def only(*keys):
    """Returns the cells of the committed table; all but the given ones are rare."""
    rare = pytest.mark.exhaustive
    return [key if key in keys else pytest.param(key, marks=rare) for key in COMPILED]


def planned_cell(key):
    """Returns the plan of a cell of the table, by the shape of BERT-tiny with fewer words."""
    name, unit = key.split(" | ")
    config = dict(ALGORITHMS["configs"]())[name]
    return memory.planned({**config, "privacy": ALGORITHMS["UNITS"][unit]})


@pytest.mark.parametrize("key", only("fedavg | none", "moon | none"))
def test_the_table_of_algorithms_is_within_fifteen_percent_of_the_compilers(key):
    """The plan of today, beside the compiler's figure that the benchmark wrote."""
    plan = planned_cell(key).plan.total(1)
    assert plan == COMPILED[key]["planned"]
    assert plan == roughly(COMPILED[key]["compiler"], rel=0.15)


def test_the_committed_table_of_algorithms():
    """It is made of the committed figures, all but IFCA's within 15 %, and has every algorithm."""
    text = ALGORITHMS["RESULTS"].with_suffix(".md").read_text()
    assert text == ALGORITHMS["table"](COMPILED)
    for key, cell in COMPILED.items():
        # The compiler keeps more in IFCA's loop over models than the plan counts.
        known = 0.25 if key.startswith("ifca") else 0.15
        assert cell["planned"] == roughly(cell["compiler"], rel=known), key
    methods = {key.split(" | ")[0] for key in COMPILED}
    assert {name for name, _ in ALGORITHMS["configs"]()} <= methods


@pytest.mark.long("compiles the step of a model of two layers with all optimisations")
@pytest.mark.usefixtures("_optimised")
@pytest.mark.parametrize("key", only("fedavg | none"))
def test_the_sum_is_within_fifteen_percent_of_the_compilers(key):
    found = planned_cell(key)
    assert found.plan.total(1) == roughly(compiled_bytes(found.parts, 1), rel=0.15)


CPU, H100, T4, TPU = (
    fp.contracts.Platform(*x) for x in (("cpu",), ("gpu", 9.0), ("gpu", 7.5), ("tpu",))
)


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((8, 128), "float32", 4 * 8 * 128),  # one tile
        ((64, 64), "float32", 4 * 64 * 128),  # 64 of 128 columns
        ((128, 2), "float32", 4 * 8 * 128),  # the layout [2, 128]: 2 of 8 rows
        ((4, 12, 197, 197), "bfloat16", 2 * 4 * 12 * 200 * 256),  # the two axes of 197
        ((16, 64, 384), "float32", 4 * 16 * 64 * 384),  # nothing is padded
        ((8, 100), "bool", 8 * 128),
        ((5,), "float32", 4 * 5),  # fewer than two axes
        ((), "float32", 4),
        ((0, 7), "float32", 0),
    ],
)
def test_arrays_of_a_tpu_are_padded_to_tiles(shape, dtype, nbytes):
    x = jax.core.ShapedArray(shape, jnp.dtype(dtype))
    assert storage_on(TPU).nbytes(x) == nbytes
    assert storage_on(CPU).nbytes(x) == x.size * x.dtype.itemsize


def test_only_old_gpus_store_bfloat16_as_float32():
    x = jax.core.ShapedArray((3, 5), jnp.dtype("bfloat16"))
    sizes = [
        storage_on(platform).nbytes(x) for platform in (CPU, fp.contracts.Platform("gpu"), H100, T4)
    ]
    assert sizes == [30, 30, 30, 60]


def test_a_recomputed_block_shares_its_largest_array_on_accelerators():
    """Attention's scores are the largest array, and a block's residuals have their shape."""
    few_words = {**LLAMA, "vocab_size": 100}
    found = activations(*parts(few_words, remat="blocks", attention="whole"), platform=H100)
    assert found.largest == (8, 4, 64, 64)
    assert found.working == 4 * 8 * 4 * 64 * 64


def test_what_is_wide_between_narrow_arrays_is_in_registers_on_accelerators():
    """GELU computes in float32 from a bfloat16 array, which is the largest one here."""
    wide = {**BERT, "intermediate_size": 1024, "num_hidden_layers": 2}
    found = activations(*parts(wide, dtype="bfloat16"), platform=H100)
    assert found.largest == (8, 64, 1024)
    assert found.working == 2 * 2 * 8 * 64 * 1024


def test_what_a_step_moves_is_not_padded():
    found = activations(*parts(BERT), platform=TPU)
    assert found.moved < found.residuals, "width 32 is padded"


CELLS = json.loads((BENCHMARKS / "results" / "accelerators.json").read_text())
FAR = {
    "gpt2 | a100-80gb | auto": 0.8495,
    "llama-8b | v5e | auto": 0.627,  # arrays between nf4's codes and values
    "minilm | v5e | auto": 0.6537,  # random bits of dropout, padded
    "roberta-base | v5e | auto": 0.734,  # likewise
}
"""Rounds of which the plan is more than 15 % off: they hold arrays that are not counted."""


@pytest.mark.parametrize("key", sorted(CELLS))
def test_the_committed_plan_is_within_fifteen_percent_of_the_targets_compiler(key):
    ratio = CELLS[key]["planned"] / CELLS[key]["memory"]
    assert ratio == (roughly(FAR[key], abs=5e-4) if key in FAR else roughly(1, abs=0.15))


@pytest.mark.parametrize(
    "key", ["minilm | v5e | auto", "minilm | t4 | auto", "llama-8b | h100 | auto"]
)
@pytest.mark.sample("minilm | t4 *")
def test_the_committed_plan_is_the_present_one(key):
    benchmark = runpy.run_path(str(BENCHMARKS / "accelerators.py"))
    assert benchmark["planned_bytes"](*key.split(" | ")) == CELLS[key]["planned"]
