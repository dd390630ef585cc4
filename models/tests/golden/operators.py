"""Writes operators.json: what onnxruntime gives for single nodes over many attributes and opsets.

Run with onnx, onnxruntime and numpy installed:  python operators.py
The tests read the file only.
"""
import json
import pathlib

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

random = np.random.default_rng(7)
cases = []


def data(*shape, low=-1.0, high=1.0):
    return random.uniform(low, high, shape).astype(np.float32).round(3)


def ints(*values):
    return np.array(values, dtype=np.int64)


def case(op, opset, inputs, outputs=1, constant=(), shapes=None, **attributes):
    """`constant`: positions of inputs that are initializers; `shapes`: of outputs, where onnx cannot infer them."""
    inputs = [None if i is None else np.asarray(i) for i in inputs]
    names = [f"i{n}" if i is not None else "" for n, i in enumerate(inputs)]
    given = [(n, i) for n, i in zip(names, inputs) if i is not None]
    node = helper.make_node(op, names, [f"o{n}" for n in range(outputs)], **attributes)
    values = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(i.dtype), i.shape)
              for k, (n, i) in enumerate(given) if int(n[1:]) not in constant]
    fixed = [numpy_helper.from_array(i, n) for n, i in given if int(n[1:]) in constant]
    results = [onnx.ValueInfoProto(name=f"o{n}") for n in range(outputs)]
    graph = helper.make_graph([node], "g", values, results, fixed)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if opset <= onnx.defs.onnx_opset_version():
        model = onnx.shape_inference.infer_shapes(model)
    else:
        for name, shape in shapes.items():
            model.graph.output[int(name[1:])].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {n: i for n, i in given if int(n[1:]) not in constant})

    def plain(x):
        if x is None:
            return None
        kind = {"f": "float", "i": "int64", "b": "bool"}[x.dtype.kind]
        values = [round(float(v), 6) for v in x.ravel()] if kind == "float" else x.ravel().tolist()
        return {"type": kind, "shape": list(x.shape), "values": values}

    cases.append({
        "op": op, "opset": opset,
        "attributes": {k: plain(numpy_helper.to_array(v)) if isinstance(v, TensorProto) else v
                       for k, v in attributes.items()},
        "inputs": [plain(i) for i in inputs], "constant": list(constant),
        "outputs": [plain(o) for o in found],
    })


# Convolution
x = data(2, 4, 7, 6)
case("Conv", 7, [x, data(3, 4, 3, 3), data(3)], kernel_shape=[3, 3])
case("Conv", 11, [x, data(6, 2, 3, 2)], group=2, strides=[2, 1], pads=[1, 0, 2, 1], dilations=[2, 1])
case("Conv", 17, [x, data(4, 1, 3, 3)], group=4, auto_pad="SAME_LOWER", strides=[2, 2])
case("Conv", 17, [x, data(2, 4, 2, 4)], auto_pad="SAME_UPPER", strides=[2, 3])
case("Conv", 22, [x, data(2, 4, 3, 3)], auto_pad="VALID", strides=[1, 2])
case("Conv", 17, [data(2, 3, 9), data(4, 3, 3), data(4)], strides=[2], pads=[2, 1], dilations=[2])
# Matrix products
case("Gemm", 7, [data(3, 4), data(4, 2), data(2)])
case("Gemm", 11, [data(4, 3), data(2, 4)], transA=1, transB=1, alpha=0.5)
case("Gemm", 13, [data(3, 4), data(2, 4), data(3, 1)], transB=1, beta=-1.5)
case("Gemm", 13, [data(3, 4), data(4, 2), np.float32(0.7).reshape(())], beta=2.0)
case("MatMul", 9, [data(2, 3, 4), data(4, 5)])
case("MatMul", 13, [data(2, 1, 3, 4), data(3, 4, 2)])
case("MatMul", 13, [data(4), data(2, 4, 3)])
case("MatMul", 13, [data(2, 3, 4), data(4)])
case("MatMul", 13, [data(4), data(4)])
case("MatMul", 13, [data(3, 4), data(1, 1, 4, 2)])
# Element-wise
for op in ("Relu", "Sigmoid", "Tanh"):
    case(op, 14, [data(3, 5, low=-4, high=4)])
x = data(3, 5, low=-4, high=4)
for op, opset in (("HardSwish", 14), ("Mish", 18), ("Softplus", 7), ("Softsign", 7), ("LeakyRelu", 7),
                  ("ThresholdedRelu", 10), ("Elu", 7), ("Selu", 7), ("Celu", 12), ("HardSigmoid", 7), ("Shrink", 9),
                  ("Gelu", 20)):
    case(op, opset, [x])
case("Gelu", 20, [x], approximate="tanh")
case("LeakyRelu", 16, [x], alpha=0.3)
case("ThresholdedRelu", 10, [x], alpha=0.5)
case("Elu", 7, [x], alpha=0.4)
case("Selu", 7, [x], alpha=1.2, gamma=0.9)
case("Celu", 12, [x], alpha=0.6)
case("HardSigmoid", 7, [x], alpha=0.3, beta=0.4)
case("Shrink", 9, [x], lambd=1.0, bias=0.75)
case("PRelu", 7, [data(2, 3, 4), data(3, 1)])
case("PRelu", 16, [data(2, 3, 4), data(1)])
case("Clip", 6 + 1, [data(3, 5)], min=-0.25, max=0.5)
case("Clip", 13, [data(3, 5), np.float32(-0.25), np.float32(0.5)], constant=(1, 2))
case("Clip", 13, [data(3, 5), None, np.float32(0.5)], constant=(2,))
for op in ("Add", "Sub", "Mul", "Div"):
    case(op, 7, [data(2, 3, 4), data(3, 1, low=0.5)])
    case(op, 14, [data(3, 1), data(2, 1, 4, low=0.5)])
case("Div", 14, [ints(7, -7, 7, -7), ints(2, 2, -2, -2)])
case("Mul", 14, [ints(3, 4), ints(5)])
# Pooling
x = data(2, 2, 7, 8)
case("MaxPool", 8, [x], kernel_shape=[2, 3], strides=[2, 2], pads=[0, 1, 1, 1])
case("MaxPool", 10, [x], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 1, 1, 1])
case("MaxPool", 12, [x], kernel_shape=[2, 2], strides=[3, 3], dilations=[2, 1], ceil_mode=1)
case("MaxPool", 12, [x], kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")
case("MaxPool", 12, [data(1, 2, 9)], kernel_shape=[3], strides=[2], pads=[1, 1])
case("AveragePool", 7, [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
case("AveragePool", 7, [x], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1)
case("AveragePool", 11, [x], kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_LOWER")
case("AveragePool", 19, [x], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
case("AveragePool", 19, [x], kernel_shape=[2, 2], dilations=[2, 3])
case("AveragePool", 10, [data(1, 2, 9)], kernel_shape=[4], strides=[2])
case("GlobalAveragePool", 7, [data(2, 3, 4, 5)])
case("ReduceMean", 13, [data(2, 3, 4, 5)], axes=[2, -1], keepdims=0)
case("ReduceMean", 18, [data(2, 3, 4, 5), ints(2, 3)], constant=(1,))
case("ReduceMean", 18, [data(2, 3)], keepdims=0)
case("GlobalMaxPool", 7, [data(2, 3, 4, 5)])
case("GlobalMaxPool", 7, [data(2, 3, 2, 3, 2)])
case("MaxPool", 12, [x], 2, kernel_shape=[3, 3], strides=[2, 1], pads=[1, 0, 1, 1])
case("MaxPool", 12, [x], 2, kernel_shape=[2, 2], storage_order=1)
# Transposed convolution
x = data(2, 4, 3, 4)
case("ConvTranspose", 7, [x, data(4, 3, 3, 3), data(3)], kernel_shape=[3, 3])
case("ConvTranspose", 11, [x, data(4, 2, 3, 2)], group=2, strides=[3, 2], pads=[1, 0, 2, 1], dilations=[2, 1])
case("ConvTranspose", 11, [x, data(4, 1, 3, 3)], group=4, auto_pad="SAME_LOWER", strides=[2, 2])
case("ConvTranspose", 11, [x, data(4, 2, 3, 3)], auto_pad="SAME_UPPER", strides=[2, 2])
case("ConvTranspose", 11, [x, data(4, 2, 3, 3)], strides=[2, 2], output_shape=[7, 8])
case("ConvTranspose", 11, [x, data(4, 2, 3, 3)], strides=[2, 3], pads=[1, 1, 1, 1], output_padding=[1, 2])
case("ConvTranspose", 11, [data(2, 3, 5), data(3, 2, 4), data(2)], strides=[2], pads=[1, 2])
# Normalisation
case("MeanVarianceNormalization", 13, [data(2, 3, 2, 2)])
case("MeanVarianceNormalization", 13, [data(2, 3, 4)], axes=[0, 2])
case("LpNormalization", 7, [data(2, 3, 4)], axis=1)
case("LpNormalization", 7, [data(2, 3, 4)], p=1)
c = [data(3), data(3), data(3), data(3, low=0.5)]
case("BatchNormalization", 9, [data(2, 3, 4, 2), *c], epsilon=1e-3)
case("BatchNormalization", 15, [data(2, 3), *c])
for opset in (17,):
    case("LayerNormalization", opset, [data(2, 3, 4), data(4), data(4)])
    case("LayerNormalization", opset, [data(2, 3, 4), data(3, 4)], axis=1, epsilon=0.01)
    case("LayerNormalization", opset, [data(2, 3, 4), data(3, 4), data(3, 4)], 3, axis=-2)
case("InstanceNormalization", 7, [data(2, 3, 4, 2), data(3), data(3)], epsilon=0.001)
case("GroupNormalization", 18, [data(2, 4, 3), data(2), data(2)], num_groups=2)
case("GroupNormalization", 21, [data(2, 6, 2, 2), data(6), data(6)], num_groups=3, epsilon=0.01)
case("LRN", 13, [data(2, 6, 2, 2)], size=3, alpha=0.3, beta=0.6, bias=1.2)
case("LRN", 13, [data(2, 5, 3, 1)], size=5)
for opset in (11, 13):
    case("Softmax", opset, [data(2, 3, 4, low=-5, high=5)])
    case("Softmax", opset, [data(2, 3, 4)], axis=1)
    case("LogSoftmax", opset, [data(2, 3, 4, low=-5, high=5)], axis=-1)
case("Dropout", 13, [data(3, 4), np.float32(0.5)], constant=(1,))
# Recurrent layers: 3 steps, batch 2, 4 inputs, 5 hidden


def recurrent(op, gates, outputs, directions=1, opset=14, bias=True, initial=True, peepholes=False, **attributes):
    d, h = directions, 5
    batch_first = attributes.get("layout") == 1
    x = data(2, 3, 4) if batch_first else data(3, 2, 4)
    state = (2, d, h) if batch_first else (d, 2, h)
    inputs = [x, data(d, gates * h, 4), data(d, gates * h, h), data(d, 2 * gates * h) if bias else None, None,
              data(*state) if initial else None]
    if op == "LSTM":
        inputs += [data(*state) if initial else None, data(d, 3 * h) if peepholes else None]
    while inputs[-1] is None:
        inputs.pop()
    case(op, opset, inputs, outputs, constant=(1, 2, 3) if bias else (1, 2), hidden_size=h, **attributes)


for op, gates, outputs in (("LSTM", 4, 3), ("GRU", 3, 2), ("RNN", 1, 2)):
    recurrent(op, gates, outputs)
    recurrent(op, gates, outputs, 2, direction="bidirectional")
    recurrent(op, gates, outputs, direction="reverse", opset=7, bias=False, initial=False)
    recurrent(op, gates, outputs, clip=0.4)
recurrent("GRU", 3, 2, 2, direction="bidirectional", linear_before_reset=1)
recurrent("GRU", 3, 2, linear_before_reset=1, bias=False, clip=0.3)
recurrent("GRU", 3, 2, activations=["HardSigmoid", "Softsign"], activation_alpha=[0.3], activation_beta=[0.4])
recurrent("LSTM", 4, 3, 2, direction="bidirectional", peepholes=True)
recurrent("LSTM", 4, 3, input_forget=1)
recurrent("LSTM", 4, 3, activations=["HardSigmoid", "Elu", "Relu"], activation_alpha=[0.3, 0.8], activation_beta=[0.4])
recurrent("LSTM", 4, 3, activations=["Sigmoid", "ScaledTanh", "Softsign"], activation_alpha=[1.2],
          activation_beta=[0.7])
recurrent("RNN", 1, 2, activations=["Relu"])
recurrent("RNN", 1, 2, activations=["LeakyRelu"], activation_alpha=[0.2])
# Losses
labels = ints(2, 0, 1, 2, -1, 1).reshape(2, 3)
for reduction in ("none", "sum", "mean"):
    case("SoftmaxCrossEntropyLoss", 13, [data(2, 3), ints(2, 0)], reduction=reduction)
    case("SoftmaxCrossEntropyLoss", 13, [data(2, 3, 3), labels, data(3, low=0.2)], 2, reduction=reduction,
         ignore_index=-1)
    case("NegativeLogLikelihoodLoss", 13, [data(2, 3, 3), labels, data(3, low=0.2)], reduction=reduction,
         ignore_index=-1)
case("NegativeLogLikelihoodLoss", 13, [data(2, 3), ints(2, 0)])
# Attention: batch 2, 4 query heads of width 3, 5 queries, 6 keys
q, k, v = data(2, 4, 5, 3), data(2, 4, 6, 3), data(2, 4, 6, 2)
y = {"o0": [2, 4, 5, 2]}
case("Attention", 23, [q, k, v], shapes=y)
case("Attention", 23, [q, k, v], shapes=y, is_causal=1, scale=0.4)
case("Attention", 23, [q, k, v, data(5, 6)], shapes=y, softcap=0.5)
case("Attention", 23, [q, k, v, random.uniform(size=(2, 1, 5, 6)) < 0.7], shapes=y, softcap=0.5)
case("Attention", 23, [q, data(2, 2, 6, 3), data(2, 2, 6, 2)], shapes=y)
case("Attention", 23, [data(2, 5, 12), data(2, 6, 6), data(2, 6, 4), data(5, 6)], shapes={"o0": [2, 5, 8]},
     q_num_heads=4, kv_num_heads=2)
case("Attention", 23, [q, data(2, 4, 4, 3), data(2, 4, 4, 2), None, data(2, 4, 2, 3), data(2, 4, 2, 2)], 3,
     shapes={**y, "o1": [2, 4, 6, 3], "o2": [2, 4, 6, 2]}, is_causal=1)
# Shapes
x = data(2, 3, 4)
case("Flatten", 7, [x])
case("Flatten", 13, [x], axis=0)
case("Flatten", 13, [x], axis=-1)
case("Reshape", 7, [x, ints(0, -1)], constant=(1,))
case("Reshape", 14, [x, ints(-1, 2, 0)], constant=(1,))
case("Squeeze", 7, [data(1, 3, 1)], axes=[0])
case("Squeeze", 13, [data(1, 3, 1), ints(-1)], constant=(1,))
case("Squeeze", 13, [data(1, 3, 1)])
case("Unsqueeze", 7, [data(3, 2)], axes=[0, 3])
case("Unsqueeze", 13, [data(3, 2), ints(1, -1)], constant=(1,))
case("Transpose", 7, [x])
case("Transpose", 13, [x], perm=[1, 2, 0])
case("Concat", 7, [data(2, 1, 3), data(2, 4, 3)], axis=1)
case("Concat", 13, [ints(1, 2), ints(3)], axis=-1)
case("Slice", 9, [x], starts=[1, 0], ends=[3, 2], axes=[1, 0])
case("Slice", 13, [x, ints(-1), ints(-99), ints(2), ints(-2)], constant=(1, 2, 3, 4))
case("Slice", 13, [x, ints(0, 1), ints(1, 99)], constant=(1, 2))
case("Pad", 7, [data(2, 3)], pads=[1, 0, 0, 2], value=0.5)
case("Pad", 13, [data(2, 3), ints(0, 1, 2, 0), np.float32(-1)], constant=(1, 2))
case("Pad", 18, [data(2, 3), ints(1, 2), None, ints(1)], constant=(1, 3))
for mode in ("reflect", "edge", "wrap"):
    opset = 19 if mode == "wrap" else 13
    case("Pad", opset, [data(3, 4), ints(2, 1, 0, 3)], constant=(1,), mode=mode)
case("Pad", 7, [data(3, 4)], pads=[0, 2, 1, 0], mode="edge")
case("Pad", 13, [data(3, 4), ints(-1, 1, 2, -2)], constant=(1,))
# Resizing
image = data(1, 2, 4, 5)
sizes = ints(1, 2, 7, 3)
case("Upsample", 7, [image], mode="nearest", scales=[1.0, 1.0, 2.0, 1.5])
case("Upsample", 9, [image, np.array([1, 1, 2, 3], np.float32)], constant=(1,), mode="linear")
case("Resize", 10, [image, np.array([1, 1, 0.6, 2.5], np.float32)], constant=(1,), mode="nearest")
case("Resize", 10, [image, np.array([1, 1, 1.5, 2], np.float32)], constant=(1,), mode="linear")
for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"):
    for mode in ("nearest", "linear", "cubic"):
        case("Resize", 13, [image, None, None, sizes], constant=(3,), mode=mode,
             coordinate_transformation_mode=coordinates)
for nearest in ("round_prefer_ceil", "floor", "ceil"):
    case("Resize", 13, [image, None, np.array([1, 1, 1.5, 0.8], np.float32)], constant=(2,), nearest_mode=nearest,
         coordinate_transformation_mode="half_pixel")
case("Resize", 13, [image, None, None, sizes], constant=(3,), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5)
case("Resize", 13, [image, np.array([0, 0, -0.3, 0.2, 1, 1, 0.8, 1.1], np.float32), None, sizes], constant=(1, 3),
     mode="linear", coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=2.5)
case("Resize", 18, [image, None, None, ints(8, 8)], constant=(3,), mode="linear", axes=[2, 3],
     keep_aspect_ratio_policy="not_larger")
# Sums of products
case("Einsum", 12, [data(2, 3, 4), data(2, 4, 5)], equation="bij, bjk -> bik")
case("Einsum", 12, [data(2, 3, 4), data(5, 4)], equation="...d,kd")
case("Einsum", 12, [data(3, 3, 2)], equation="iij->ji")
case("Einsum", 12, [data(2, 3)], equation="ij->i")
case("Einsum", 12, [data(2, 2, 3, 4), data(2, 5, 2, 4)], equation="bhqd,bkhd->bhqk")
case("Gather", 13, [x, np.array([[0, -1], [2, 1]])], axis=1)
case("Gather", 13, [ints(4, 5, 6), np.array(1)])
case("Cast", 13, [np.array([-1.7, 0.0, 2.9], np.float32)], to=int(TensorProto.INT64))
case("Cast", 13, [ints(0, 3)], to=int(TensorProto.BOOL))
case("Cast", 13, [np.array([True, False])], to=int(TensorProto.FLOAT))
case("Shape", 13, [x])
case("Shape", 15, [x], start=-2)
case("ConstantOfShape", 9, [ints(2, 3)], constant=(0,))
case("ConstantOfShape", 9, [ints(2)], constant=(0,), value=numpy_helper.from_array(ints(7)))
case("Constant", 13, [], value_ints=[4, 5])
case("Identity", 13, [x])

path = pathlib.Path(__file__).with_suffix(".json")
path.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
print(len(cases), "cases,", path.stat().st_size, "bytes")
