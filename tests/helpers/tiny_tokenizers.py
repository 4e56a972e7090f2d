"""Fast tokenizers of three kinds, trained on a few sentences."""

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The old lighthouse of Marenholm was built in 1871 by the brothers Anders and Ib Koldsen.",
    "Its lamp burns rapeseed oil, and on clear nights one sees it from Sankt Pauls Harbour.",
    "Who built the lighthouse? When was it built? What does the lamp burn?",
    "Café Ølgod sells waffles (50% off on Sundays) near the harbour of Marenholm.",
]


def bert() -> PreTrainedTokenizerFast:
    """Returns a lower-casing WordPiece tokenizer with [CLS], [SEP] and token types."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    columns = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=columns, **names)


def roberta() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with <s> and </s>, which adds no space before a text."""
    backend = _byte_level(["<s>", "<pad>", "</s>"])
    backend.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    names = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "eos_token": "</s>"}
    return _fast(backend, names)


def gpt2() -> PreTrainedTokenizerFast:
    """Returns a byte-level tokenizer with a token for the end of a text (0) and nothing else."""
    backend = _byte_level(["<|endoftext|>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return _fast(backend, {"eos_token": "<|endoftext|>"})


def _byte_level(special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def _fast(backend: Tokenizer, names: dict[str, str]) -> PreTrainedTokenizerFast:
    columns = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=columns, **names)
