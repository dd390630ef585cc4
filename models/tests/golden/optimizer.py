"""Writes optimizer.json: weights after steps of PyTorch's optimizers.

Run with torch installed:  python optimizer.py
The tests read the file only.
"""
import json
import pathlib

import torch

START = [[0.5, -1.0, 2.0, 0.0, -0.25], [1.5, -0.75]]


def gradient(step, weight):
    """A gradient that the test can compute as well."""
    index = torch.arange(weight.numel(), dtype=torch.float32)
    return 0.5 * weight.detach() + 0.1 * (index - 1.0) - 0.05 * step


def trajectory(optimizer, **options):
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in START]
    optimizer = optimizer(weights, **options)
    history = []
    for step in range(5):
        # A changing rate, since momentum must not have it in its velocity.
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] / (1 + step)
        for weight in weights:
            weight.grad = gradient(step, weight)
        optimizer.step()
        history.append([w.detach().tolist() for w in weights])
    return history


sgd, adam, adamw = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
cases = []
for momentum, decay, nesterov in [(0, 0, False), (0.9, 0, False), (0.9, 0.1, False), (0.8, 0.05, True), (0, 0.1, False)]:
    options = {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov}
    cases.append({"optimizer": "sgd", **options, "lr": 0.1, "weights": trajectory(sgd, lr=0.1, **options)})
for kind, name, decay in [(adam, "adam", 0), (adam, "adam", 0.1), (adamw, "adamw", 0.1)]:
    history = trajectory(kind, lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    cases.append({"optimizer": name, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": decay,
                  "lr": 0.05, "weights": history})
path = pathlib.Path(__file__).with_suffix(".json")
path.write_text("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
