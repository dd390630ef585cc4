"""Writes norm_dropout_skip.onnx beside this file: Conv, batch norm in training mode, dropout, and a connection
that leads past the second half to the end.

Needs numpy and onnx; the tests only need what it wrote.
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save

rng = np.random.default_rng(1)


def weight(name, *shape):
    return numpy_helper.from_array(rng.normal(0, 0.2, shape).astype(np.float32), name)


def constant(name, value, dtype=np.float32):
    return numpy_helper.from_array(np.array(value, dtype), name)


initializers = [
    weight("conv1.weight", 6, 1, 3, 3),
    constant("norm1.weight", [1.0] * 6),
    constant("norm1.bias", [0.0] * 6),
    constant("norm1.running_mean", [0.0] * 6),
    constant("norm1.running_var", [1.0] * 6),
    weight("conv2.weight", 8, 6, 3, 3),
    constant("norm2.weight", [1.0] * 8),
    constant("norm2.bias", [0.0] * 8),
    constant("norm2.running_mean", [0.0] * 8),
    constant("norm2.running_var", [1.0] * 8),
    constant("ratio", 0.25),
    constant("training", True, bool),
    weight("fc.weight", 10, 8 * 4 * 4),
    constant("fc.bias", [0.0] * 10),
    weight("skip.weight", 10, 6 * 4 * 4),
    constant("skip.bias", [0.0] * 10),
]


def norm(name, x):
    inputs = [x] + [f"{name}.{p}" for p in ("weight", "bias", "running_mean", "running_var")]
    outputs = [f"{name}.out", f"{name}.mean_out", f"{name}.var_out"]
    return helper.make_node("BatchNormalization", inputs, outputs, name=name, training_mode=1, momentum=0.9)


nodes = [
    helper.make_node("Conv", ["input", "conv1.weight"], ["c1"], name="conv1", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
    norm("norm1", "c1"),
    helper.make_node("Relu", ["norm1.out"], ["r1"], name="relu1"),
    helper.make_node("MaxPool", ["r1"], ["p1"], name="pool1", kernel_shape=[2, 2], strides=[2, 2]),
    helper.make_node("Conv", ["p1", "conv2.weight"], ["c2"], name="conv2", pads=[1, 1, 1, 1], kernel_shape=[3, 3]),
    norm("norm2", "c2"),
    helper.make_node("Relu", ["norm2.out"], ["r2"], name="relu2"),
    helper.make_node("Dropout", ["r2", "ratio", "training"], ["d2"], name="dropout"),
    helper.make_node("Flatten", ["d2"], ["f"], name="flatten"),
    helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["main"], name="fc", transB=1),
    helper.make_node("Flatten", ["p1"], ["f1"], name="flatten_skip"),
    helper.make_node("Gemm", ["f1", "skip.weight", "skip.bias"], ["skipped"], name="skip", transB=1),
    helper.make_node("Add", ["main", "skipped"], ["output"], name="add"),
]
graph = helper.make_graph(
    nodes,
    "norm_dropout_skip",
    [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1, 8, 8])],
    [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 10])],
    initializers,
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
checker.check_model(model)
save(model, Path(__file__).with_suffix(".onnx"))
