"""Writes pytorch.json: forward and backward of operators as PyTorch computes them.

Run with torch and numpy installed:  python pytorch.py
The tests read the file only.
"""
import json
import pathlib
import sys

# This file's own folder would hide the package of the same name.
sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
cases = []


def data(*shape):
    return (2 * torch.rand(shape) - 1).round(decimals=3).requires_grad_()


def plain(x):
    if x is None:
        return None
    x = x.detach()
    if x.dtype == torch.int64:
        return {"type": "int64", "shape": list(x.shape), "values": x.ravel().tolist()}
    return {"type": "float", "shape": list(x.shape), "values": [round(v, 7) for v in x.ravel().tolist()]}


def case(op, opset, inputs, outputs, constant=(), **attributes):
    """`inputs` as the ONNX operator lists them, `outputs` computed from them."""
    flows_back = [data(*o.shape).detach() for o in outputs]
    leaves = [i for i in inputs if i is not None and i.requires_grad]
    gradients = iter(torch.autograd.grad(outputs, leaves, flows_back))
    cases.append({
        "op": op, "opset": opset, "attributes": attributes, "inputs": [plain(i) for i in inputs],
        "constant": list(constant), "outputs": [plain(o) for o in outputs],
        "flows_back": [plain(g) for g in flows_back],
        "gradients": [plain(next(gradients)) if i is not None and i.requires_grad else None for i in inputs],
    })


# Activations
x = data(4, 6)
with torch.no_grad():
    x *= 4
case("Gelu", 20, [x], [F.gelu(x)])
case("Gelu", 20, [x], [F.gelu(x, approximate="tanh")], approximate="tanh")
case("Mish", 18, [x], [F.mish(x)])
case("Softplus", 7, [x], [F.softplus(x)])
case("Elu", 7, [x], [F.elu(x, 0.7)], alpha=0.7)
case("HardSwish", 14, [x], [F.hardswish(x)])
case("LeakyRelu", 16, [x], [F.leaky_relu(x, 0.2)], alpha=0.2)
slope = data(6)
case("PRelu", 16, [x, slope], [torch.where(x > 0, x, slope * x)])
# Normalisations
x, w, b = data(3, 5, 8), data(8), data(8)
case("LayerNormalization", 17, [x, w, b], [F.layer_norm(x, [8], w, b, 1e-5)])
case("RMSNormalization", 23, [x, w], [F.rms_norm(x, [8], w, 1e-5)], epsilon=1e-5)
x, w, b = data(2, 6, 3, 2), data(6), data(6)
case("GroupNormalization", 21, [x, w, b], [F.group_norm(x, 3, w, b)], num_groups=3)
case("InstanceNormalization", 7, [x, w, b], [F.instance_norm(x, weight=w, bias=b)])
# Losses
scores, labels, weights = data(4, 3, 2), torch.tensor([[0, 2], [1, 1], [2, -7], [0, 1]]), data(3).detach().abs() + 0.1
for reduction in ("none", "sum", "mean"):
    loss = F.cross_entropy(scores, labels, weights, ignore_index=-7, reduction=reduction)
    case("SoftmaxCrossEntropyLoss", 13, [scores, labels, weights], [loss], reduction=reduction, ignore_index=-7)
    loss = F.nll_loss(scores, labels, weights, ignore_index=-7, reduction=reduction)
    case("NegativeLogLikelihoodLoss", 13, [scores, labels, weights], [loss], reduction=reduction, ignore_index=-7)
# Attention
q, k, v, bias = data(2, 4, 5, 3), data(2, 4, 6, 3), data(2, 4, 6, 2), data(5, 6)
case("Attention", 23, [q, k, v, bias], [F.scaled_dot_product_attention(q, k, v, bias)])
k, v = data(2, 4, 5, 3), data(2, 4, 5, 2)
case("Attention", 23, [q, k, v], [F.scaled_dot_product_attention(q, k, v, is_causal=True)], is_causal=1)
k, v = data(2, 2, 5, 3), data(2, 2, 5, 2)
y = F.scaled_dot_product_attention(q, k, v, scale=0.4, enable_gqa=True)
case("Attention", 23, [q, k, v], [y], scale=0.4)
# Convolution and resizing
x, w, b = data(2, 4, 3, 4), data(4, 2, 3, 2), data(4)
y = F.conv_transpose2d(x, w, b, stride=(3, 2), padding=(1, 0), output_padding=(1, 0), groups=2, dilation=(2, 1))
case("ConvTranspose", 11, [x, w, b], [y], group=2, strides=[3, 2], pads=[1, 0, 1, 0], output_padding=[1, 0],
     dilations=[2, 1])
for mode, aligned in (("bilinear", False), ("bilinear", True), ("bicubic", False)):
    y = F.interpolate(x, (5, 3), mode=mode, align_corners=aligned)
    case("Resize", 13, [x, None, None, torch.tensor([2, 4, 5, 3])], [y], constant=(3,),
         mode={"bilinear": "linear", "bicubic": "cubic"}[mode],
         coordinate_transformation_mode="align_corners" if aligned else "half_pixel")
case("Pad", 13, [x, torch.tensor([0, 0, 1, 2, 0, 0, 2, 1])], [F.pad(x, (2, 1, 1, 2), mode="reflect")], constant=(1,),
     mode="reflect")


def recurrent(op, order, bidirectional, **attributes):
    """`order`: where ONNX's gates stand in PyTorch's weights."""
    d, h, steps, batch = 1 + bidirectional, 5, 4, 3
    layer = getattr(nn, op)(6, h, bidirectional=bidirectional)
    x, w, r = data(steps, batch, 6), data(d, len(order) * h, 6), data(d, len(order) * h, h)
    b, states = data(d, 2 * len(order) * h), [data(d, batch, h) for _ in range(1 + (op == "LSTM"))]

    def ordered(t):
        parts = t.reshape(len(order), h, *t.shape[1:])
        return torch.cat([parts[order.index(gate)] for gate in range(len(order))])

    weights = {}
    for direction in range(d):
        suffix = "_l0" + "_reverse" * direction
        weights["weight_ih" + suffix] = ordered(w[direction])
        weights["weight_hh" + suffix] = ordered(r[direction])
        for name, half in zip(("bias_ih", "bias_hh"), b[direction].chunk(2)):
            weights[name + suffix] = ordered(half)
    state = tuple(states) if op == "LSTM" else states[0]
    y, last = torch.func.functional_call(layer, weights, (x, state))
    y = y.reshape(steps, batch, d, h).transpose(1, 2)
    outputs = [y, *(last if op == "LSTM" else [last])]
    case(op, 14, [x, w, r, b, None, *states], outputs, hidden_size=h,
         direction="bidirectional" if bidirectional else "forward", **attributes)


for bidirectional in (False, True):
    recurrent("LSTM", [0, 3, 1, 2], bidirectional)  # ONNX: input, output, forget, cell; PyTorch: input, forget, cell, output
    recurrent("GRU", [1, 0, 2], bidirectional, linear_before_reset=1)  # update, reset, new; PyTorch: reset, update, new
    recurrent("RNN", [0], bidirectional)

path = pathlib.Path(__file__).with_suffix(".json")
path.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
print(len(cases), "cases,", path.stat().st_size, "bytes")
