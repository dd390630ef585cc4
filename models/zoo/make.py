"""Makes mlp_digits.onnx, alexnet.onnx and vgg16.onnx of this folder (needs only onnx and numpy).

AlexNet and VGG-16 are graphs without weights: each weight is the output of a ConstantOfShape node, so
the files are a few KB. Initialise them before training (dp-run --init he). Layers and names follow
torchvision's alexnet and vgg16; its adaptive average pool is the identity for 224 x 224 images and
left out. lenet5.onnx and chargpt.onnx were exported from PyTorch and are not made here.

    python models/zoo/make.py
"""

from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, shape_inference

OPSET, IR_VERSION = 17, 8
FOLDER = Path(__file__).parent


class Network:
    """A chain of nodes, named as PyTorch's exporter names them."""

    def __init__(self, name, input_shape, classes):
        self.name, self.classes = name, classes
        self.input = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *input_shape])
        self.nodes, self.initializers = [], []
        self.value = "input"

    def add(self, op, scope, inputs=(), **attributes):
        """Appends a node that reads the current value."""
        name = f"{scope}/{op}"
        output = f"{name}_output_0"
        self.nodes.append(helper.make_node(op, [self.value, *inputs], [output], name=name, **attributes))
        self.value = output

    def constant(self, name, array):
        """A tensor that the nodes may share."""
        if all(tensor.name != name for tensor in self.initializers):
            self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def fill(self, name, shape):
        """A weight of zeros that takes no space in the file."""
        dims = self.constant(f"{name}.shape", np.array(shape, np.int64))
        self.nodes.append(helper.make_node("ConstantOfShape", [dims], [name], name=f"{name}/ConstantOfShape"))
        return name

    def dropout(self, scope):
        ratio = self.constant("dropout.ratio", np.float32(0.5))
        training = self.constant("dropout.training_mode", np.bool_(True))
        self.add("Dropout", scope, [ratio, training])

    def save(self):
        self.nodes[-1].output[0] = "output"
        output = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", self.classes])
        graph = helper.make_graph(self.nodes, self.name, [self.input], [output], self.initializers)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="dp-zoo"
        )
        checker.check_model(model)
        shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        (FOLDER / f"{self.name}.onnx").write_bytes(model.SerializeToString())


def mlp_digits():
    """64-64-32-10 for 8 x 8 digits, He initialisation, seed 0."""
    network = Network("mlp_digits", [8, 8], 10)
    network.add("Flatten", "/0", axis=1)
    random = np.random.default_rng(0)
    widths = [64, 64, 32, 10]
    for index, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
        scope = 1 + 2 * index
        weight = random.normal(0, np.sqrt(2 / fan_in), (fan_out, fan_in)).astype(np.float32)
        network.add(
            "Gemm",
            f"/{scope}",
            [
                network.constant(f"{scope}.weight", weight),
                network.constant(f"{scope}.bias", np.zeros(fan_out, np.float32)),
            ],
            transB=1,
        )
        if fan_out != widths[-1]:
            network.add("Relu", f"/{scope + 1}")
    network.save()


def convolutional(name, features, classifier):
    """features: ("conv", channels, kernel, stride, padding), "relu" or ("pool", kernel, stride);
    classifier: a width, "relu" or "dropout". Their places give PyTorch's names."""
    network = Network(name, [3, 224, 224], 1000)
    channels, size = 3, 224
    for index, feature in enumerate(features):
        scope = f"/features/features.{index}"
        match feature:
            case "relu":
                network.add("Relu", scope)
            case ("conv", out, kernel, stride, padding):
                weight = network.fill(f"features.{index}.weight", [out, channels, kernel, kernel])
                bias = network.fill(f"features.{index}.bias", [out])
                network.add(
                    "Conv",
                    scope,
                    [weight, bias],
                    kernel_shape=[kernel] * 2,
                    strides=[stride] * 2,
                    pads=[padding] * 4,
                )
                channels, size = out, (size + 2 * padding - kernel) // stride + 1
            case ("pool", kernel, stride):
                network.add("MaxPool", scope, kernel_shape=[kernel] * 2, strides=[stride] * 2)
                size = (size - kernel) // stride + 1
    network.add("Flatten", "", axis=1)
    width = channels * size * size
    for index, feature in enumerate(classifier):
        scope = f"/classifier/classifier.{index}"
        match feature:
            case "relu":
                network.add("Relu", scope)
            case "dropout":
                network.dropout(scope)
            case out:
                weight = network.fill(f"classifier.{index}.weight", [out, width])
                bias = network.fill(f"classifier.{index}.bias", [out])
                network.add("Gemm", scope, [weight, bias], transB=1)
                width = out
    network.save()


def alexnet():
    convolutional(
        "alexnet",
        [
            ("conv", 64, 11, 4, 2), "relu", ("pool", 3, 2),
            ("conv", 192, 5, 1, 2), "relu", ("pool", 3, 2),
            ("conv", 384, 3, 1, 1), "relu",
            ("conv", 256, 3, 1, 1), "relu",
            ("conv", 256, 3, 1, 1), "relu", ("pool", 3, 2),
        ],
        ["dropout", 4096, "relu", "dropout", 4096, "relu", 1000],
    )


def vgg16():
    features = []
    for width, depth in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        features += [("conv", width, 3, 1, 1), "relu"] * depth + [("pool", 2, 2)]
    convolutional("vgg16", features, [4096, "relu", "dropout", 4096, "relu", "dropout", 1000])


if __name__ == "__main__":
    mlp_digits()
    alexnet()
    vgg16()
