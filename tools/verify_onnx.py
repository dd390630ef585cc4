#!/usr/bin/env python3
"""Runs a trained model in ONNX Runtime over the held-out samples that dp-run kept and compares.

usage: verify_onnx.py RUN_DIR    with RUN_DIR/trained.onnx, RUN_DIR/test.npz (x, y, output), RUN_DIR/summary.json
"""

import json
import sys
from pathlib import Path

import numpy
import onnxruntime


def run_model(path, x):
    """Outputs for all of x, in batches of the size that the model fixes (one by one where it fixes none)."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    fixed = entry.shape[0]
    batch = fixed if isinstance(fixed, int) else len(x)
    outputs = []
    for start in range(0, len(x), batch):
        part = x[start : start + batch]
        padding = batch - len(part)
        padded = numpy.concatenate([part, numpy.repeat(part[-1:], padding, axis=0)])
        outputs.append(session.run(None, {entry.name: padded})[0][: len(part)])
    return numpy.concatenate(outputs)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    test = numpy.load(directory / "test.npz")
    summary = json.loads((directory / "summary.json").read_text())
    output = run_model(directory / "trained.onnx", test["x"])

    # Relative to the largest output, so that wide logits are not judged more strictly than narrow ones.
    difference = numpy.abs(output - test["output"]).max() / max(1.0, numpy.abs(test["output"]).max())
    accuracy = float((output.argmax(axis=1) == test["y"]).mean())
    ours = summary["test_accuracy"]
    print(f"{directory}: {len(output)} samples, accuracy {accuracy:.2%} in ONNX Runtime, {ours:.2%} in dp-run, "
          f"largest output difference {difference:.1e}")
    if difference > 1e-4 or abs(accuracy - ours) > 1e-3:
        sys.exit("error: ONNX Runtime and dp-run disagree")


if __name__ == "__main__":
    main()
