"""Times training steps of ours and of PyTorch in turns, on one core and one thread each.

    python bench/pytorch.py target/release/examples/bench_ops [--rounds 15] [--only NAME]

A step is a forward and a backward to all inputs and weights; of LeNet-5 the loss and the optimizer step too.
Each round times both sides one after the other; the table shows medians over all rounds.
"""
import argparse
import math
import os
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


def leaf(*shape):
    return (torch.rand(*shape) - 0.5).requires_grad_()


def operator(function, *inputs):
    output = function(*inputs)
    grad = torch.rand_like(output) - 0.5
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad)


def lenet5():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.rand(32, 1, 28, 28), torch.arange(32) % 10

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def conv(x, w, b):
    return F.conv2d(x, w, b, padding=1)


def batch_norm():
    mean, variance = torch.zeros(64), torch.ones(64)
    step = lambda x, w, b: F.batch_norm(x, mean, variance, w, b, training=True)
    return operator(step, leaf(16, 64, 56, 56), leaf(64), leaf(64))


CASES = {
    "lenet5": ("LeNet-5, batch 32", lenet5),
    "conv-64-128-56": (
        "conv 3x3 64->128, 56x56, batch 8",
        lambda: operator(conv, leaf(8, 64, 56, 56), leaf(128, 64, 3, 3), leaf(128)),
    ),
    "conv-256-256-14": (
        "conv 3x3 256->256, 14x14, batch 16",
        lambda: operator(conv, leaf(16, 256, 14, 14), leaf(256, 256, 3, 3), leaf(256)),
    ),
    "linear-4096-4096": (
        "linear 4096->4096, batch 32",
        lambda: operator(F.linear, leaf(32, 4096), leaf(4096, 4096), leaf(4096)),
    ),
    "linear-25088-4096": (
        "linear 25088->4096, batch 32",
        lambda: operator(F.linear, leaf(32, 25088), leaf(4096, 25088), leaf(4096)),
    ),
    "matmul-4096-4096": (
        "matmul 32x4096x4096, weight [k,n]",
        lambda: operator(torch.matmul, leaf(32, 4096), leaf(4096, 4096)),
    ),
    "batchnorm-64-56": ("batch norm 64x56x56, batch 16", batch_norm),
    "maxpool-64-112": (
        "max pool 2x2, 8x64x112x112",
        lambda: operator(lambda x: F.max_pool2d(x, 2), leaf(8, 64, 112, 112)),
    ),
}


def seconds(step, count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


class Ours:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, case, count):
        self.process.stdin.write(f"{case} {count}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"error: the benchmark program ended in case {case}")
        return [float(time) / 1e3 for time in answer.split()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="our side, built by cargo build --release --example bench_ops")
    parser.add_argument("--rounds", type=int, default=15, help="turns per case (default 15)")
    parser.add_argument("--only", choices=CASES, action="append", help="leave out the other cases")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # Both sides on the same core; the program inherits it.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    ours = Ours(args.program)
    print(f"training step on one core, medians of {args.rounds} turns; PyTorch {torch.__version__}")
    print(f"{'case':<36}{'ours ms':>10}{'PyTorch ms':>12}{'ratio':>8}")
    logs = []
    for case in args.only or CASES:
        label, make = CASES[case]
        step = make()
        seconds(step, 2)
        warm = min(ours.seconds(case, 3))
        # Short steps are repeated, so that a turn is not all switching.
        count = max(1, min(50, int(0.02 / warm)))
        mine, theirs = [], []
        for _ in range(args.rounds):
            mine += ours.seconds(case, count)
            theirs += seconds(step, count)
        mine, theirs = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
        logs.append(math.log(mine / theirs))
        print(f"{label:<36}{mine:>10.3f}{theirs:>12.3f}{mine / theirs:>8.2f}", flush=True)
    worst = math.exp(max(logs))
    print(f"geometric mean of the ratios {math.exp(statistics.mean(logs)):.2f}, largest {worst:.2f}")


if __name__ == "__main__":
    main()
