"""Trains a tokenizer and a small Llama from scratch on the texts of some data sets.

The result is an ordinary checkpoint directory (``config.json``, safetensors, ``tokenizer.json``
with a chat template) that stands for a pretrained base in small experiments:

    python experiments/llm/pretrain.py --out runs/llm/base
    python experiments/llm/pretrain.py --out runs/llm/base --texts 20newsgroups sst2=DIR squad=DIR

Only texts are read, no labels and no answers. Training goes on where it stopped if the command is
given again.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import optax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import fedjax_peft as fp
from fedjax_peft.data.reading import Reading
from fedjax_peft.tasks.sources import load_tables

TEXTS = {
    "20newsgroups": ("text",),
    "semeval2010_task8": ("text",),
    "sst2": ("text",),
    "squad": ("context", "question"),
    "qqp": ("text", "text_pair"),
    "mnli": ("text", "text_pair"),
    "qnli": ("text", "text_pair"),
}
"""The columns of texts of each data set."""

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The chat template. Its marks say which tokens the assistant writes."""
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def texts_of(name: str, source: str, most: int) -> list[str]:
    """Returns the different training texts of a data set, at most ``most`` characters in all."""
    _, tables = load_tables(name, Reading(source=source))
    columns = tables["train"].columns
    texts = list(dict.fromkeys(t for column in TEXTS[name] for t in columns[column]))
    random.Random(0).shuffle(texts)
    kept, size = [], 0
    for text in texts:
        size += len(text)
        if size > most:
            break
        kept.append(text)
    return kept


def documents(texts: list[str], length: int) -> Iterator[str]:
    """Yields texts of at least ``length`` characters: short ones are joined by line breaks."""
    joined: list[str] = []
    for text in texts:
        joined.append(" ".join(text.split()))
        if sum(map(len, joined)) >= length:
            yield "\n".join(joined)
            joined = []
    if joined:
        yield "\n".join(joined)


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a chat template."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIAL),
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def main(words: Sequence[str] | None = None) -> None:
    """Makes the tokenizer and the texts, trains, and writes the checkpoint."""
    args = arguments(words)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = args.out / "corpus"
    sources = dict(item.split("=", 1) if "=" in item else (item, "auto") for item in args.texts)
    if not (args.out / "tokenizer").exists():
        texts = {name: texts_of(name, source, args.most) for name, source in sources.items()}
        for name, some in texts.items():
            print(f"{name}: {len(some):,} texts, {sum(map(len, some)):,} characters", flush=True)
        # Long documents, so that few blocks are partly empty: a document's last one.
        rows = [d for some in texts.values() for d in documents(some, 64 * args.length)]
        random.Random(0).shuffle(rows)
        held_out = max(len(rows) // 100, 1)
        corpus.mkdir(exist_ok=True)
        for split, part in (("test", rows[:held_out]), ("train", rows[held_out:])):
            lines = "".join(json.dumps({"text": row}) + "\n" for row in part)
            (corpus / f"{split}.jsonl").write_text(lines)
        train_tokenizer(rows[held_out:], args.vocabulary).save_pretrained(args.out / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.out / "tokenizer")
    data = fp.load_dataset(
        str(corpus), tokenizer=tokenizer, max_length=args.length, task="next_token"
    )
    steps = args.tokens // (args.batch * args.length)
    print(f"{data['train']}\n{steps:,} steps", flush=True)

    config = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": args.width,
        "intermediate_size": 8 * args.width // 3 // 8 * 8,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.width // 32,
        "num_key_value_heads": max(args.width // 64, 1),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    model = fp.random_model(config, head=fp.heads.causal_lm(), dropout=0.0)
    model = fp.attach(model, fp.peft.full()).replace(tokenizer=tokenizer)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, steps // 50 + 1, steps, args.rate / 20
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1)
    )
    run_directory = args.out / "run"
    per_round = min(args.steps_per_round, steps)
    rounds = -(-steps // per_round)
    run = fp.simulate(
        model,
        fp.algorithms.centralised(optimizer),
        fp.partition.pooled(data["train"]),
        test=data["test"],
        rounds=rounds,
        local_steps=per_round,
        batch_size=args.batch,
        evaluation=fp.Evaluation(every=1),
        records=fp.Records(
            checkpoint_every=1,
            on_round=lambda row: print(
                {k: row[k] for k in ("round", "test_perplexity", "seconds") if k in row}, flush=True
            ),
        ),
        placement=fp.Placement(length_buckets=1),
        out=run_directory,
        resume=run_directory.exists(),
    )
    run.export(args.out / "checkpoint", format="merged", overwrite=True)
    tokenizer.save_pretrained(args.out / "checkpoint")
    print(f"The base is in {args.out / 'checkpoint'}.")


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument(
        "--texts", nargs="+", default=list(TEXTS), metavar="NAME[=DIR]", help="data sets"
    )
    parser.add_argument("--most", type=int, default=10_000_000, help="characters of a data set")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128, help="multiple of 32")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128, help="tokens of a block")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens to train on")
    parser.add_argument("--steps-per-round", type=int, default=300)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
