"""Local training equals that of ``peft`` with torch's AdamW: losses and trained weights."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from closeness import assert_close, assert_small
from internals import Method, client, default_targets
from peft import (
    HiraConfig,
    IA3Config,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    ShiraConfig,
    VeraConfig,
    get_peft_model,
)
from torch_reference import FAMILIES, SHAPE, layers, padded_batch, saved, tensors, tiny_model

import fedjax_peft as fp
from fedjax_peft import peft, tasks

STEPS = 5
# A large eps: Adam would else magnify the rounding of a gradient that happens to be near zero.
ADAMW = {"weight_decay": 0.05, "eps": 1e-5}

pytestmark = pytest.mark.slow


# ---------------------------------------------------------------- peft's parameters as our leaves


def transposed(x):
    return x.T if x.ndim == 2 else x


def as_leaves(name, x, family):
    """Returns our leaves of a torch parameter, in our layout: views of its memory."""
    stem, _, last = name.rpartition(".")
    if last == "ia3_l":
        return {name: x.view(-1)}
    if stem.endswith(".oft_R") or last in ("hira_A", "hira_B", "miss_block"):
        path = stem.removesuffix(".oft_R") if last == "weight" else stem
        return {f"{path}.{'oft_r' if last == 'weight' else last.lower()}": x.T}
    if last.startswith(("shira_", "vera_")):
        return {name: x}
    if match := re.search(r"\.lora_(A|B|magnitude)(_vector)?$", stem):
        return {f"{stem[: match.start()]}.lora_{match[1].lower()}": transposed(x)}
    if last == "weight" and stem.endswith("_embeddings"):
        return {f"{stem}.embedding": x}
    if last == "weight":
        return {f"{stem}.{'kernel' if x.ndim == 2 else 'scale'}": transposed(x)}
    return {name: x}


def as_prompt(name, x, family):
    return {f"{family}.embeddings.word_embeddings.prompt": x}


def slot(family, layer):
    return f"{family}.encoder.layer.{layer}.attention.self.prefix"


def as_prefix(name, x, family):
    """The keys and values of all layers are side by side."""
    parts = enumerate(x.split(SHAPE["hidden_size"], dim=1))
    return {f"{slot(family, i // 2)}.prefix_{('key', 'value')[i % 2]}": part for i, part in parts}


# ----------------------------------------------------------------------------- methods and peft's


class Case(NamedTuple):
    """A method, and the equivalent settings of peft."""

    ours: Method
    theirs: Callable[[Any, tuple[str, ...]], Any]
    """(torch model, head modules) -> the model in which only what we train has a gradient."""
    prompt: Callable[[str, torch.Tensor, str], dict[str, torch.Tensor]] = as_leaves
    """(name, parameter, family) -> our leaves of what is in peft's prompt encoder."""
    given: Callable[[dict, Any], dict] = lambda batch, config: batch
    """(batch, config) -> the batch for torch."""


def with_peft(config, **options):
    """Returns the function that attaches peft's method."""

    def make(base, head):
        whole = {"task_type": "SEQ_CLS", "modules_to_save": list(head)}
        if base.config.model_type == "vit":
            del whole["task_type"]  # PEFT has none for images
        if config not in (IA3Config, PrefixTuningConfig, PromptTuningConfig):
            whole["target_modules"] = list(default_targets(base.config.to_dict())["lora"])
        if base.config.model_type == "gpt2":
            whole["fan_in_fan_out"] = True
        return get_peft_model(base, config(**whole, **options))

    return make


def own_positions(batch, config):
    """Returns the batch with shifted positions, because peft counts the prefix and we do not."""
    real = batch["attention_mask"]
    if config.model_type == "roberta":
        positions = np.cumsum(real, axis=1) * real + config.pad_token_id
    else:
        positions = np.broadcast_to(np.arange(real.shape[1]), real.shape)
    return batch | {"position_ids": positions.astype(np.int32) - TOKENS}


RANK, ALPHA, TOKENS = 4, 6.0, 3
LORA = {"r": RANK, "lora_alpha": ALPHA}
PATTERNS = {
    "rank_pattern": {"value": 2, r"layer\.1\.attention\.self\.query": 5},
    "alpha_pattern": {"layer.0.attention.self.value": 3.0},
}
PREFIX = {"num_virtual_tokens": TOKENS}
CASES = {
    "lora": Case(peft.lora(RANK, alpha=ALPHA), with_peft(LoraConfig, **LORA)),
    "lora-svd": Case(peft.lora(RANK, alpha=ALPHA, init="svd"), with_peft(LoraConfig, **LORA)),
    "lora-patterns": Case(
        peft.lora(RANK, alpha=ALPHA, **PATTERNS), with_peft(LoraConfig, **LORA, **PATTERNS)
    ),
    "dora": Case(peft.dora(RANK, alpha=ALPHA), with_peft(LoraConfig, use_dora=True, **LORA)),
    "ia3": Case(peft.ia3(), with_peft(IA3Config)),
    "prompt": Case(peft.prompt_tuning(TOKENS), with_peft(PromptTuningConfig, **PREFIX), as_prompt),
    "prefix": Case(
        peft.prefix_tuning(TOKENS),
        with_peft(PrefixTuningConfig, **PREFIX),
        as_prefix,
        own_positions,
    ),
    "hira": Case(peft.hira(RANK), with_peft(HiraConfig, r=RANK)),
    "miss": Case(peft.miss(5), with_peft(MissConfig, r=5)),
    "oft": Case(peft.oft(8), with_peft(OFTConfig, oft_block_size=8)),
    "oft-6": Case(
        peft.oft(16, block_share=True, terms=6),
        with_peft(OFTConfig, oft_block_size=16, block_share=True, num_cayley_neumann_terms=6),
    ),
    "oft-exact": Case(
        peft.oft(8, neumann=False),
        with_peft(OFTConfig, oft_block_size=8, use_cayley_neumann=False),
    ),
    "shira": Case(peft.shira(RANK), with_peft(ShiraConfig, r=RANK)),
    "vera": Case(peft.vera(48), with_peft(VeraConfig, r=48)),
    "full": Case(peft.full(), lambda base, head: base),
}
BOTH = ("lora-svd", "dora", "ia3", "prompt", "prefix")
PRODUCT = [
    *((method, "bert") for method in CASES),
    *((method, "roberta") for method in BOTH),
    *(("lora", family) for family in FAMILIES if family != "bert"),
    *((method, family) for method in ("dora", "ia3") for family in ("llama", "qwen2")),
    *((method, "gpt2") for method in ("hira", "vera")),
]
DEEP = {"lora-patterns", "prefix"}
"""Methods whose layers differ, which need two of them."""


def without_dropout(family):
    """Returns the config fields of a family that hold dropout rates, all 0."""
    fields = vars(FAMILIES[family].config())
    return {name: 0.0 for name in fields if "dropout" in name or name.endswith("pdrop")}


def leaves_in(reference, case, family):
    """Returns torch's trained parameters as our leaves."""
    found = {}
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            name = re.sub(r"\.(default|modules_to_save)\b", "", name)
            name = re.sub(r"^base_model\.(model\.)?", "", name)
            short = name.removeprefix("prompt_encoder.")
            read = as_leaves if short == name else case.prompt
            found |= read(short, parameter.data, family)
    return found


def give_constants(reference, model):
    """Gives torch's model our random places and matrices, which it has drawn otherwise."""
    constants = {n: np.array(x) for n, x in model.trainable.items() if model.kinds[n] == "fixed"}
    for name, x in constants.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "shira_indices":
            layer = reference.base_model.model.get_submodule(path)
            layer.shira_indices["default"] = torch.tensor(x.T)
        if leaf in ("vera_a", "vera_b"):  # all layers of these tests have one size
            getattr(reference.base_model, f"vera_{leaf[-1].upper()}")["default"] = torch.tensor(x.T)


# -------------------------------------------------------------------------------------- training


def train_ours(model, start, batches):
    """Returns the losses and the trained leaves of the library's own local steps."""
    fixed = {name: x for name, x in model.trainable.items() if model.kinds[name] == "fixed"}

    def apply(params, batch, key, train):
        return model.apply(model.frozen, {**fixed, **params}, batch, key, train)

    optimizer = optax.adamw(1e-2, b1=0.9, b2=0.98, **ADAMW)
    update = client(optimizer, fp.contracts.ClientContext(apply, tasks.classification(), {}, 1))
    state, losses = update.init(start, {}, jax.random.key(0)), []
    step = jax.jit(update.step)
    for batch in batches:
        state, metrics = step(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
    return losses, update.final(state)[0]


def train_torch(reference, batches):
    reference.train()
    parameters = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.98), **ADAMW)
    losses = []
    for batch in batches:
        loss = reference(**tensors(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("method", "family"), PRODUCT)
@pytest.mark.sample(
    *("lora-svd-bert", "full-bert", "prompt-roberta", "prefix-roberta", "dora-qwen2", "ia3-llama"),
    *("lora-vit", "lora-gpt2", "hira-gpt2", "miss-bert", "oft-exact-bert", "shira-bert"),
    "vera-bert",
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch, in peft's SHiRA
def test_five_steps(method, family, tmp_path):
    case = CASES[method]
    depth = layers(family, 2 if method in DEEP else 1)
    base = tiny_model(family, **without_dropout(family), **depth)
    model = fp.attach(fp.load_model(saved(base, tmp_path)), case.ours)
    reference = case.theirs(base, model.head)
    theirs = leaves_in(reference, case, family)
    assert theirs.keys() == {name for name, kind in model.kinds.items() if kind != "fixed"}

    # A start that both have, away from what is special about a fresh one, such as B = 0.
    rng = np.random.default_rng(0)
    start = {}
    for name, x in theirs.items():
        moved = 0.2 * rng.normal(size=x.shape) if model.kinds[name] == "adapter" else 0.0
        start[name] = (np.asarray(model.trainable[name]) + moved).astype(np.float32)
        x.copy_(torch.tensor(start[name]))
    give_constants(reference, model)
    for name, x in model.frozen.items():  # an SVD start changes the frozen kernels
        if method == "lora-svd" and name.endswith(".base.kernel"):
            layer = base.get_submodule(name.removesuffix(".base.kernel")).base_layer
            layer.weight.data.copy_(torch.tensor(np.asarray(x).T))

    batches = [
        padded_batch(base.config, seed=seed) | {"labels": rng.integers(0, 3, 4).astype(np.int32)}
        for seed in range(STEPS)
    ]
    losses, trained = train_ours(model, start, batches)
    expected = train_torch(reference, [case.given(batch, base.config) for batch in batches])
    assert_close(losses, expected, rtol=1e-4)
    for name, x in theirs.items():
        size, moved, off = map(
            np.linalg.norm, (x, x.numpy() - start[name], trained[name] - x.numpy())
        )
        # AdamW divides by eps = 1e-5 where a gradient is small: an error of 1e-8 moves a value by
        # 1e-5 in a step, 5e-5 in all, beside values of some tenths.
        assert_small(off, 4e-4 * size, name)
        if not name.endswith("key.bias"):  # it adds a constant to a query's scores: no gradient
            assert moved > 1e-2 * size, name
            assert_small(off, 1e-3 * moved, name)
