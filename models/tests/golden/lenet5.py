"""Writes lenet5.json: what PyTorch makes of three training steps of models/zoo/lenet5.onnx.

Run with torch and onnx installed:  python lenet5.py
The tests read the file only.
"""
import json
import pathlib

import onnx
import torch
from onnx import numpy_helper
from torch import nn

BATCH, STEPS, LR, MOMENTUM = 8, 3, 0.02, 0.9
here = pathlib.Path(__file__).parent
torch.set_num_threads(1)

model = nn.Sequential(
    nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
)
graph = onnx.load(here / "../../zoo/lenet5.onnx").graph
model.load_state_dict({i.name: torch.from_numpy(numpy_helper.to_array(i).copy()) for i in graph.initializer})

index = torch.arange(BATCH * 28 * 28, dtype=torch.float64)
images = (0.5 + 0.5 * torch.sin(index * index * 0.0007)).float().reshape(BATCH, 1, 28, 28)
labels = (torch.arange(BATCH) * 3) % 10


def summary(tensor):
    """Enough to tell tensors apart: sums, and some elements at a stride."""
    flat = tensor.detach().double().flatten()
    return {"sum": flat.sum().item(), "squares": flat.square().sum().item(),
            "elements": flat[:: max(1, len(flat) // 16)].tolist()}


optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
steps = []
for _ in range(STEPS):
    optimizer.zero_grad()
    logits = model(images)
    loss = nn.functional.cross_entropy(logits, labels)
    loss.backward()
    gradients = {name: summary(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    steps.append({
        "loss": loss.item(), "correct": int((logits.argmax(1) == labels).sum()), "logits": logits.flatten().tolist(),
        "gradients": gradients, "weights": {name: summary(p) for name, p in model.named_parameters()},
    })
path = pathlib.Path(__file__).with_suffix(".json")
path.write_text(json.dumps({"batch": BATCH, "lr": LR, "momentum": MOMENTUM, "steps": steps}, indent=1) + "\n")
