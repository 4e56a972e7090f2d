"""Model directories: damaged files raise InputError, and no weight that is not finite is loaded."""

import json
import shutil

import jax
import numpy as np
import pytest
from formats import SHAPE, write_gguf, write_onnx
from fuzzing import damaged, damaged_json, dumped, fuzz, refused_or_fine
from hypothesis import given
from hypothesis import strategies as st
from internals import Gguf, Onnx, tokenize
from torch_reference import tiny_model

import fedjax_peft as fp

pytestmark = pytest.mark.slow

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    return fp.testing.write_tiny_checkpoint(tmp_path_factory.mktemp("intact"))


@pytest.fixture(scope="module")
def copy(intact, tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(intact, folder)
    return folder


def load(intact, folder, name, content):
    """Loads a model after replacing the content of one file."""
    (folder / name).write_bytes(content)
    try:
        with refused_or_fine():
            if name.startswith("tokenizer"):
                tokenizer = fp.load_tokenizer(folder)
                tokenize(tokenizer, ["w1 w2", ""], max_length=8)
                return
            model = fp.load_model(folder, head=fp.heads.classification(3))
            for leaf in jax.tree.leaves(model.frozen):
                assert np.isfinite(leaf).all()
    finally:
        shutil.copy(intact / name, folder / name)


@fuzz(40)
@given(data=st.data(), name=st.sampled_from(FILES))
def test_a_damaged_file(intact, copy, data, name):
    content = data.draw(damaged((intact / name).read_bytes()))
    load(intact, copy, name, content)


@fuzz(40)
@given(data=st.data(), name=st.sampled_from([f for f in FILES if f.endswith("json")]))
def test_hostile_values(intact, copy, data, name):
    content = data.draw(damaged_json(json.loads((intact / name).read_text())))
    load(intact, copy, name, dumped(content))


@pytest.fixture(scope="module")
def others(intact, tmp_path_factory):
    """A GGUF and an ONNX file, each with the class that reads it."""
    folder = tmp_path_factory.mktemp("others")
    write_gguf(folder / "model.gguf", tiny_model("llama", kind="causal_lm", **SHAPE), "Q8_0")
    write_onnx(intact, folder / "model.onnx")
    return {Gguf: folder / "model.gguf", Onnx: folder / "model.onnx"}


@fuzz(40)
@given(data=st.data(), kind=st.sampled_from([Gguf, Onnx]))
def test_a_damaged_file_of_another_format(others, copy, data, kind):
    path = copy.parent / others[kind].name
    path.write_bytes(data.draw(damaged(others[kind].read_bytes())))
    with refused_or_fine():
        stored = kind(path)
        for name in stored.shapes:
            assert np.isfinite(stored.read(name, False)).all()
        if kind is Gguf:
            fp.load_tokenizer(path)
