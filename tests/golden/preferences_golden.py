"""Writes the golden file of preferences: losses and gradients of TRL 1.16.0 in float32.

TRL is not among the test tools. With it, torch and transformers installed:

    python tests/golden/preferences_golden.py             # writes preferences/trl.safetensors

The policy and the reference are two tiny Llamas with random weights (:func:`models`).
"""

import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.kto_config import KTOConfig
from trl.trainer.kto_trainer import KTOTrainer

import fedjax_peft as fp

FILE = Path(__file__).parent / "preferences" / "trl.safetensors"
PAIRS = [
    ("Is it red?", "Yes, it is.", "No."),
    ("Say a word.", "Word", "I would rather say three words"),
    ("2 and 2?", "4", "It is 5, I think."),
    ("Who are you", "nobody at all, really", "me"),
]
LOSSES = {
    "dpo": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid"], "beta": 0.2}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"], "beta": 0.2}),
    "orpo": (ORPOTrainer, ORPOConfig, {"beta": 0.2}),
    "simpo": (
        CPOTrainer,
        CPOConfig,
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0},
    ),
    "kto": (KTOTrainer, KTOConfig, {"beta": 0.2, "desirable_weight": 1.2}),
}
LEAVES = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


def models(folder: str) -> list[Path]:
    """Writes the policy and the reference, and returns their folders."""
    write = fp.testing.write_tiny_language_model
    how = {"initializer_range": 0.1, "num_hidden_layers": 1}
    return [write(Path(folder) / str(seed), seed=seed, **how) for seed in (0, 1)]


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        both = models(folder)
        for name in LOSSES:
            # The other way round, the mean over unrelated answers is positive, and so counts.
            policy, reference = both[::-1] if name == "kto" else both
            made = measured(name, policy, reference, folder)
            found |= {f"{name}.{key}": x.detach().clone().contiguous() for key, x in made.items()}
    FILE.parent.mkdir(exist_ok=True)
    save_file(found, FILE)


def measured(name: str, policy: Path, reference: Path, folder: str) -> dict[str, torch.Tensor]:
    trainer, config, options = LOSSES[name]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    conversational = [
        {
            "prompt": [{"role": "user", "content": prompt}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        for prompt, chosen, rejected in PAIRS
    ]
    size = 1 if name == "orpo" else 2 * len(PAIRS)
    if name == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for side in ("chosen", "rejected")
            for row in conversational
        ]
    else:
        rows = conversational
    how = {"max_length": 64, "per_device_train_batch_size": size, "report_to": "none"}
    how |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    known = config.__dataclass_fields__
    arguments = config(output_dir=folder, **{k: v for k, v in how.items() if k in known}, **options)
    others = {}
    if name in ("dpo", "ipo", "kto"):
        others["ref_model"] = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    made = trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy),
        **others,
    )
    examples = [made.train_dataset[i] for i in range(len(made.train_dataset))]
    groups = [[one] for one in examples] if name == "orpo" else [examples]
    total = torch.zeros(())
    for group in groups:
        batch = made.data_collator(group)
        loss = made.compute_loss(made.model, batch) / len(groups)
        loss.backward()
        total += loss.detach()
    leaves = dict(made.model.named_parameters())
    found = {"loss": total} | {leaf: leaves[leaf].grad for leaf in LEAVES}
    tokens = ("input_ids", "attention_mask", "completion_mask")
    return found | ({key: batch[key] for key in tokens} if name == "dpo" else {})


if __name__ == "__main__":
    main()
