"""Writes whole_models.json: losses of 20 training steps that PyTorch makes of exported models.

Run with torch and onnx installed, giving the folder of exports:  python whole_models.py ../../../../shared/models
The tests read whole_models.json and the exports. The graph of each file is interpreted with PyTorch's functions and
differentiated by its autograd, in double precision; weights are the file's float initializers. Dropout is left out.
`rounding` is by how much PyTorch's own single precision is off (relative, the most up to each step): untrained networks
with many batch norms multiply rounding errors from step to step.
"""
import json
import math
import pathlib
import sys

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper

STEPS, LR, MOMENTUM = 20, 0.003, 0.9
torch.set_num_threads(1)
TYPES = {6: torch.int32, 7: torch.int64, 9: torch.bool}


def tensor(proto):
    array = numpy_helper.to_array(proto)
    values = torch.from_numpy(array.copy())
    return values.to(torch.get_default_dtype()) if values.is_floating_point() else values


def ints(x):
    return [int(v) for v in x.reshape(-1)]


def padding(a, spatial):
    pads = a.get("pads", [0] * 2 * spatial)
    assert a.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    assert pads[:spatial] == pads[spatial:], "uneven padding"
    return pads[:spatial]


def slices(x, starts, ends, axes=None, steps=None):
    axes = ints(axes) if axes is not None else range(len(starts))
    steps = ints(steps) if steps is not None else [1] * len(starts)
    index = [slice(None)] * x.dim()
    for start, end, axis, step in zip(ints(starts), ints(ends), axes, steps):
        assert step > 0
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def reshape(x, shape, zero_copies):
    shape = [x.shape[i] if v == 0 and zero_copies else v for i, v in enumerate(ints(shape))]
    return x.reshape(shape)


def gather_nd(x, indices):
    depth = indices.shape[-1]
    return x[tuple(indices[..., i] for i in range(depth))]


def recurrent(kind, a, x, w, r, b=None, lengths=None, *states):
    assert lengths is None
    hidden, outputs, last = r.shape[-1], [], []
    for d in range(w.shape[0]):
        h, c = (s[d] if s is not None else x.new_zeros(x.shape[1], hidden) for s in (list(states) + [None] * 2)[:2])
        wb, rb = b[d].chunk(2) if b is not None else (0, 0)
        reverse = a.get("direction") == "reverse" or d == 1
        steps = []
        for t in (reversed(range(len(x))) if reverse else range(len(x))):
            if kind == "LSTM":
                i, o, f, g = (x[t] @ w[d].T + h @ r[d].T + wb + rb).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                assert a.get("linear_before_reset") == 1
                (xz, xr, xh), (hz, hr, hh) = (x[t] @ w[d].T + wb).chunk(3, 1), (h @ r[d].T + rb).chunk(3, 1)
                z = (xz + hz).sigmoid()
                h = (1 - z) * (xh + (xr + hr).sigmoid() * hh).tanh() + z * h
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if reverse else steps))
        last.append((h, c))
    result = torch.stack(outputs, 1), torch.stack([h for h, _ in last])
    return result + ((torch.stack([c for _, c in last]),) if kind == "LSTM" else ())


def batch_norm(a, x, scale, bias, mean, var):
    # PyTorch updates the running statistics in place, its momentum being what ONNX's leaves of one.
    trains = a.get("training_mode", 0) == 1
    return F.batch_norm(x, mean, var, scale, bias, trains, 1 - a.get("momentum", 0.9), a.get("epsilon", 1e-5))


def gemm(a, x, y, c=None):
    product = a.get("alpha", 1.0) * ((x.T if a.get("transA") else x) @ (y.T if a.get("transB") else y))
    return product if c is None else product + a.get("beta", 1.0) * c


def max_pool(a, x):
    return F.max_pool2d(x, a["kernel_shape"], a.get("strides", 1), padding(a, 2), a.get("dilations", 1),
                        bool(a.get("ceil_mode", 0)))


def average_pool(a, x):
    return F.avg_pool2d(x, a["kernel_shape"], a.get("strides", 1), padding(a, 2), bool(a.get("ceil_mode", 0)),
                        bool(a.get("count_include_pad", 0)))


def split(a, outputs, x, sizes=None):
    axis = a.get("axis", 0)
    each = -(-x.shape[axis] // outputs)
    return x.split(ints(sizes) if sizes is not None else a.get("split", each), axis)


def attention(a, q, k, v, mask=None):
    assert not set(a) - {"scale", "is_causal", "qk_matmul_output_mode", "softcap"} and q.dim() == 4 and not a.get("softcap")
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=a.get("is_causal", 0) == 1, scale=a.get("scale"))


def layer_norm(a, x, scale, bias=None):
    axis = a.get("axis", -1) % x.dim()
    return F.layer_norm(x, x.shape[axis:], scale, bias, a.get("epsilon", 1e-5))


def reduce_mean(a, x, axes=None):
    return x.mean(ints(axes) if axes is not None else a["axes"], bool(a.get("keepdims", 1)))


OPERATORS = {
    "Identity": lambda a, x: x,
    "Dropout": lambda a, x, *_: x,
    "Cast": lambda a, x: x.to(TYPES.get(a["to"], torch.get_default_dtype())),
    "Constant": lambda a: a["value"],
    "ConstantOfShape": lambda a, s: a.get("value", torch.zeros(1)).reshape(()).expand(ints(s)),
    "Shape": lambda a, x: torch.tensor(list(x.shape)[a.get("start", 0):a.get("end")]),
    "Reshape": lambda a, x, s: reshape(x, s, not a.get("allowzero")),
    "Flatten": lambda a, x: x.reshape(math.prod(x.shape[:a.get("axis", 1)]), -1),
    "Transpose": lambda a, x: x.permute(a.get("perm", list(range(x.dim()))[::-1])),
    "Squeeze": lambda a, x, axes=None: x.squeeze() if axes is None else x.squeeze(tuple(ints(axes))),
    "Unsqueeze": lambda a, x, axes: reshape_with_ones(x, ints(axes)),
    "Slice": lambda a, *x: slices(*x),
    "Concat": lambda a, *x: torch.cat(x, a["axis"]),
    "Expand": lambda a, x, s: x.expand(torch.broadcast_shapes(x.shape, ints(s))),
    "Gather": lambda a, x, i: x.index_select(a.get("axis", 0), i.reshape(-1) % x.shape[a.get("axis", 0)]).reshape(
        x.shape[:a.get("axis", 0) % x.dim()] + i.shape + x.shape[a.get("axis", 0) % x.dim() + 1:]),
    "GatherElements": lambda a, x, i: x.gather(a.get("axis", 0), i),
    "GatherND": lambda a, x, i: gather_nd(x, i),
    "Range": lambda a, start, end, step: torch.arange(start.item(), end.item(), step.item()),
    "Trilu": lambda a, x, k=0: (x.triu if a.get("upper", 1) else x.tril)(int(k)),
    "Where": lambda a, c, x, y: torch.where(c, x, y),
    "Add": lambda a, x, y: x + y,
    "Mul": lambda a, x, y: x * y,
    "Div": lambda a, x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
    "Pow": lambda a, x, y: x ** y,
    "Max": lambda a, x, y: torch.maximum(x, y),
    "Sqrt": lambda a, x: x.sqrt(),
    "Erf": lambda a, x: x.erf(),
    "Tanh": lambda a, x: x.tanh(),
    "Relu": lambda a, x: x.relu(),
    "Clip": lambda a, x, low=None, high=None: x.clamp(low, high),
    "Gelu": lambda a, x: F.gelu(x, approximate=a.get("approximate", "none")),
    "Softmax": lambda a, x: x.softmax(a.get("axis", -1)),
    "And": lambda a, x, y: x & y,
    "Equal": lambda a, x, y: x == y,
    "LessOrEqual": lambda a, x, y: x <= y,
    "GreaterOrEqual": lambda a, x, y: x >= y,
    "IsNaN": lambda a, x: x.isnan(),
    "MatMul": lambda a, x, y: x @ y,
    "Gemm": gemm,
    "Conv": lambda a, x, w, b=None: F.conv2d(x, w, b, a.get("strides", 1), padding(a, 2), a.get("dilations", 1),
                                             a.get("group", 1)),
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "GlobalAveragePool": lambda a, x: x.mean((2, 3), True),
    "BatchNormalization": batch_norm,
    "LayerNormalization": layer_norm,
    "ReduceMean": reduce_mean,
    "LSTM": lambda a, *x: recurrent("LSTM", a, *x),
    "GRU": lambda a, *x: recurrent("GRU", a, *x),
    "Attention": attention,
}


def reshape_with_ones(x, axes):
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def run(graph, values):
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {k: tensor(v) if isinstance(v, onnx.TensorProto) else v.decode() if isinstance(v, bytes) else v
                      for k, v in attributes.items()}
        inputs = [values[name] if name else None for name in node.input]
        if node.op_type == "Split":
            results = split(attributes, len(node.output), *inputs)
        else:
            results = OPERATORS[node.op_type](attributes, *inputs)
        for name, result in zip(node.output, results if isinstance(results, tuple) else (results,)):
            if name:
                values[name] = result
    return values[graph.output[0].name]


def hashes(index):
    """32-bit numbers without a pattern: products and shifted exclusive ors of the index."""
    h = index.astype(np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    h = (h ^ (h >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    return h ^ (h >> np.uint64(13))


def data(info, batch, step):
    """The minibatch of a step: tokens below 17, a mask of ones, numbers in [-1, 1)."""
    shape = [batch] + [d.dim_value for d in info.type.tensor_type.shape.dim[1:]]
    count = math.prod(shape)
    numbers = hashes(np.arange(step * count, (step + 1) * count))
    if "mask" in info.name:
        return torch.ones(shape, dtype=torch.int64)
    if info.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        return torch.from_numpy((numbers % np.uint64(17)).astype(np.int64)).reshape(shape)
    # 16 bits are exact in single precision.
    numbers = torch.from_numpy((numbers >> np.uint64(16)) / 2**15 - 1)
    return numbers.to(torch.get_default_dtype()).reshape(shape)


def losses(path, precision):
    torch.set_default_dtype(precision)
    graph = onnx.load(path).graph
    statistics = {name for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]}
    # Batch norm over few samples multiplies rounding errors: larger minibatches and smaller steps keep them small.
    lr = LR / 20 if statistics else LR
    batch = 16 if statistics else graph.input[0].type.tensor_type.shape.dim[0].dim_value or 2
    fixed = {i.name: tensor(i) for i in graph.initializer}
    weights = [v.requires_grad_() for k, v in fixed.items()
               if v.is_floating_point() and v.dim() > 0 and k not in statistics]
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=MOMENTUM)
    found = []
    for step in range(STEPS):
        values = dict(fixed)
        values.update({i.name: data(i, batch, step) for i in graph.input if i.name not in fixed})
        logits = run(graph, values)
        logits = logits.reshape(-1, logits.shape[-1])
        labels = (torch.arange(len(logits)) * 3 + step).remainder(logits.shape[-1])
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return batch, lr, found


if __name__ == "__main__":
    files = sorted(pathlib.Path(sys.argv[1]).glob("*.onnx"))
    golden = {}
    for path in files:
        batch, lr, exact = losses(path, torch.float64)
        single = losses(path, torch.float32)[2]
        rounding = np.maximum.accumulate([abs(a - b) / b for a, b in zip(single, exact)])
        golden[path.name] = {"batch": batch, "lr": lr, "losses": exact, "rounding": [float(f"{r:.1e}") for r in rounding]}
        print(path.name, *(f"{loss:.4f}" for loss in exact[::6]), f"+- {rounding[-1]:.0e}", file=sys.stderr)
    text = json.dumps({"momentum": MOMENTUM, "models": golden}, indent=1)
    pathlib.Path(__file__).with_suffix(".json").write_text(text + "\n")
