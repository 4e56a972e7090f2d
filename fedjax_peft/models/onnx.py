"""Weights of a BERT model in an ONNX file, as PyTorch's exporter writes it.

Only the names and values of the weights are read; the graph is not run. The exporter keeps the name
of each weight but for the matrices of linear layers, which it transposes and numbers. Such a matrix
enters a product whose result is added to a bias, and the bias has kept its name.
"""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from fedjax_peft.models.checkpoint import broken, leaf_value
from fedjax_peft.support.display import show
from fedjax_peft.support.errors import first_line

_WHAT = "ONNX file of a BERT model"
_FLOAT = 1
"""``TensorProto.FLOAT``."""


class Onnx:
    """The weights of an ONNX file, under Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        from google.protobuf.message import DecodeError

        self.path = path
        try:
            graph = _messages()["Model"].FromString(path.read_bytes()).graph
            self._arrays = _weights(graph)
        except (DecodeError, OSError, UnicodeDecodeError, _Damaged) as error:
            raise broken(path, first_line(error), _WHAT) from error

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes by Hugging Face's names of tensors."""
        return {name: array.shape for name, array in self._arrays.items()}

    def read(self, name: str, transposed: bool) -> Array:
        """Returns a tensor in float32, with flax's order of axes if ``transposed``."""
        return leaf_value(self.path, name, self._arrays[name], transposed)


class _Damaged(Exception):
    """What is wrong with a file, in words."""


def _weights(graph: Any) -> dict[str, np.ndarray]:
    """Returns Hugging Face's name of each weight -> its array, as PyTorch stores it.

    Raises:
      _Damaged: the weights, or the nodes that name them, cannot be an exporter's.
    """
    found: dict[str, np.ndarray] = {}
    names = _linear_names(graph)
    for tensor in graph.initializer:
        shape, size = tuple(tensor.dims), len(tensor.raw_data)
        whole = all(0 < length <= size for length in shape) and 4 * math.prod(shape) == size
        if tensor.data_type != _FLOAT or not whole or len(shape) > _MOST_AXES:
            raise _Damaged(f"{show(tensor.name)} is not an array of float32 numbers")
        array = np.frombuffer(tensor.raw_data, "<f4").reshape(shape)
        linear = names.get(tensor.name)
        if linear and len(shape) != 2:
            raise _Damaged(f"{show(tensor.name)} multiplies, and is no matrix")
        name = linear or tensor.name
        if name in found:
            raise _Damaged(f"it holds {show(name)} twice")
        found[name] = array.T if linear else array
    if not found:
        raise _Damaged("it holds no weights")
    return found


_MOST_AXES = 4


def _linear_names(graph: Any) -> dict[str, str]:
    """Returns the numbered name of each linear layer's matrix -> ``<layer>.weight``."""
    texts = [text for node in graph.node for text in (node.op_type, *node.input, *node.output)]
    if not all(isinstance(x, str) for x in (*texts, *(one.name for one in graph.initializer))):
        raise _Damaged("a name is not UTF-8")  # protobuf gives its bytes
    products = [node for node in graph.node if node.op_type == "MatMul"]
    if any(len(node.input) != 2 or len(node.output) != 1 for node in products):
        raise _Damaged("a node MatMul has not two inputs and one output")
    added = {x: node for node in graph.node if node.op_type == "Add" for x in node.input}
    stored = {tensor.name for tensor in graph.initializer}
    found = {}
    for node in products:
        if node.input[1] not in stored:
            continue
        for bias in added[node.output[0]].input if node.output[0] in added else ():
            if bias in stored and bias.endswith(".bias"):
                found[node.input[1]] = bias.removesuffix("bias") + "weight"
    return found


@functools.cache
def _messages() -> dict[str, Any]:
    """Returns protobuf's classes for the few fields of ``onnx.proto`` that are read."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    F = descriptor_pb2.FieldDescriptorProto
    fields = {  # message: {field: (number, type, repeated)}
        "Tensor": {
            "dims": (1, F.TYPE_INT64, True),
            "data_type": (2, F.TYPE_INT32, False),
            "name": (8, F.TYPE_STRING, False),
            "raw_data": (9, F.TYPE_BYTES, False),
        },
        "Node": {
            "input": (1, F.TYPE_STRING, True),
            "output": (2, F.TYPE_STRING, True),
            "op_type": (4, F.TYPE_STRING, False),
        },
        "Graph": {"node": (1, ".onnx.Node", True), "initializer": (5, ".onnx.Tensor", True)},
        "Model": {"graph": (7, ".onnx.Graph", False)},
    }
    file = descriptor_pb2.FileDescriptorProto(name="onnx", package="onnx", syntax="proto2")
    for message, members in fields.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, repeated) in members.items():
            label = F.LABEL_REPEATED if repeated else F.LABEL_OPTIONAL
            named = {"type_name": kind} if isinstance(kind, str) else {}
            code = F.TYPE_MESSAGE if named else kind
            described.field.add(name=name, number=number, type=code, label=label, **named)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"onnx.{name}"))
        for name in fields
    }
