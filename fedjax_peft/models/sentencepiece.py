"""Tokenizers that are there only as a SentencePiece model, which is not read here."""

from pathlib import Path

from fedjax_peft.support.libraries import pip

NAMES = ("spm.model", "sentencepiece.bpe.model", "tokenizer.model")
"""Of DeBERTa, of XLM-RoBERTa and CamemBERT, and of Llama, Mistral and Gemma."""


def advice(folder: Path) -> str:
    """Returns a sentence that converts the tokenizer of a folder; empty if it has no such file."""
    name = next((name for name in NAMES if (folder / name).is_file()), None)
    if name is None:
        return ""
    place = repr(str(folder))
    return (
        f" It has {name}, which this line converts ({pip()} install sentencepiece): from"
        f" transformers import AutoTokenizer;"
        f" AutoTokenizer.from_pretrained({place}).save_pretrained({place})"
    )
