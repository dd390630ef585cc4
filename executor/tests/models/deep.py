"""Writes deep.onnx beside this file: sixteen fully connected layers, for pipelines of many stages.

Needs torch and onnx; the tests only need what it wrote.
"""

import pathlib

import torch
from torch import nn

WIDTH = 24


def main():
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(64, WIDTH), nn.Tanh()]
    for _ in range(14):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).eval()
    target = pathlib.Path(__file__).with_name("deep.onnx")
    torch.onnx.export(
        model,
        torch.zeros(4, 1, 8, 8),
        target,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "batch"}, "logits": {0: "batch"}},
        dynamo=False,
    )


if __name__ == "__main__":
    main()
