"""Times training steps of ours and of PyTorch in turns, on one core and one thread each.

    python bench/pytorch.py target/release/examples/bench_ops [--rounds 15] [--only NAME]

A step is a forward and a backward to all inputs and weights; of whole models the loss and the optimizer step too.
Each round times both sides one after the other; the table shows medians over all rounds. Whole models are exported from
PyTorch and trained by our side from the file. Memory is by how much three steps raise the most that a fresh process
ever had resident.
"""
import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

import networks


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


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


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
    "depthwise-128-28": (
        "depthwise conv 3x3 128, 28x28, b. 16",
        lambda: operator(
            lambda x, w, b: F.conv2d(x, w, b, padding=1, groups=128),
            leaf(16, 128, 28, 28), leaf(128, 1, 3, 3), leaf(128),
        ),
    ),
    "attention-256-64": (
        "attention 4x8, 256 tokens of 64",
        lambda: operator(attention, *(leaf(4, 8, 256, 64) for _ in range(3))),
    ),
    "layernorm-768": (
        "layer norm 8x256x768",
        lambda: operator(lambda x, w, b: F.layer_norm(x, [768], w, b), leaf(8, 256, 768), leaf(768), leaf(768)),
    ),
    "gelu-3072": ("GELU 8x256x3072", lambda: operator(F.gelu, leaf(8, 256, 3072))),
    "softmax-256": ("softmax 4x8x256x256", lambda: operator(lambda x: F.softmax(x, -1), leaf(4, 8, 256, 256))),
    "embedding-768": (
        "embedding 8x256 of 30522x768",
        lambda: operator(lambda w: F.embedding(torch.arange(2048).view(8, 256) * 7, w), leaf(30522, 768)),
    ),
}
MODELS = {"lenet5"} | set(networks.NETWORKS)


def labelled(case):
    """Name of a case, and what makes PyTorch's step."""
    if case in CASES:
        return CASES[case]
    return networks.NETWORKS[case][0], lambda: networks.training_step(case)


def seconds(step, count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def peak_mib(process="self"):
    # Not getrusage: a child begins with its parent's peak there.
    with open(f"/proc/{process}/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return float(line.split()[1]) / 1024


class Ours:
    def __init__(self, program, folder):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.folder = folder

    def seconds(self, case, count):
        name = f"{self.folder}/{case}.onnx" if case in networks.NETWORKS else case
        self.process.stdin.write(f"{name} {count}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"error: the benchmark program ended in case {case}")
        return [float(time) / 1e3 for time in answer.split()]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def memory(case, program, folder):
    """What three steps take on each side, in MiB."""
    ours = Ours(program, folder)
    ours.seconds("lenet5", 1)
    before = peak_mib(ours.process.pid)
    ours.seconds(case, 3)
    mine = peak_mib(ours.process.pid) - before
    ours.end()
    theirs = subprocess.run([sys.executable, __file__, "--memory", case], check=True, capture_output=True, text=True)
    return mine, float(theirs.stdout)


def pytorch_memory(case):
    # What PyTorch sets up once is not the case's.
    seconds(lenet5(), 1)
    before = peak_mib()
    seconds(labelled(case)[1](), 3)
    print(peak_mib() - before)


def main():
    every = list(CASES) + list(networks.NETWORKS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", help="our side, built by cargo build --release --example bench_ops")
    parser.add_argument("--rounds", type=int, default=15, help="turns per case (default 15)")
    parser.add_argument("--only", choices=every, action="append", help="leave out the other cases")
    parser.add_argument("--memory", choices=every, help="only print what PyTorch takes for a case, in MiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        # Both sides on the same core; the program inherits it.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.memory:
        pytorch_memory(args.memory)
        return
    if not args.program:
        parser.error("the program is missing")
    with tempfile.TemporaryDirectory() as folder:
        compare(args.program, folder, args.only or every, args.rounds)


def compare(program, folder, cases, rounds):
    ours = Ours(program, folder)
    print(f"training step on one core, medians of up to {rounds} turns; PyTorch {torch.__version__}")
    print(f"{'case':<38}{'ours ms':>10}{'PyTorch ms':>12}{'ratio':>7}{'ours MiB':>10}{'PyTorch MiB':>13}")
    logs = {}
    for case in cases:
        label, make = labelled(case)
        if case in networks.NETWORKS:
            networks.export(case, f"{folder}/{case}.onnx")
        step = make()
        seconds(step, 2)
        warm = min(ours.seconds(case, 3))
        # Short steps are repeated, so that a turn is not all switching; long ones are few.
        count = max(1, min(50, int(0.02 / warm)))
        turns = max(3, min(rounds, int(20 / warm)))
        mine, theirs = [], []
        for _ in range(turns):
            mine += ours.seconds(case, count)
            theirs += seconds(step, count)
        del step
        mine, theirs = statistics.median(mine) * 1e3, statistics.median(theirs) * 1e3
        logs[case] = math.log(mine / theirs)
        print(f"{label:<38}{mine:>10.3f}{theirs:>12.3f}{mine / theirs:>7.2f}", end="", flush=True)
        print("{:>10.1f}{:>13.1f}".format(*memory(case, program, folder)), flush=True)
    ours.end()
    for what, chosen in (("operators", set(CASES) - MODELS), ("whole models", MODELS)):
        found = [log for case, log in logs.items() if case in chosen]
        if found:
            mean, most = math.exp(statistics.mean(found)), math.exp(max(found))
            print(f"geometric mean of the ratios of {what} {mean:.2f}, largest {most:.2f}")


if __name__ == "__main__":
    main()
