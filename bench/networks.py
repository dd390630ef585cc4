"""The whole models of the benchmark, as PyTorch has them: each with a minibatch and its labels.

`export` writes one to the ONNX file that our side trains.
"""
import torch
from torch import nn
from torch.nn import functional as F


def conv_norm(inputs, outputs, kernel, stride=1, groups=1):
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]


class Basic(nn.Module):
    """The block of ResNet-18 (He et al., "Deep Residual Learning for Image Recognition", 2015)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(*conv_norm(inputs, outputs, 3, stride), nn.ReLU(), *conv_norm(outputs, outputs, 3))
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet18s():
    """ResNet-18 with a quarter of the channels behind the first layer, for 10 classes."""
    layers, inputs = [*conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        layers += [Basic(inputs, outputs, stride), Basic(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Inverted(nn.Module):
    """The block of MobileNetV2 (Sandler et al., 2018)."""

    def __init__(self, inputs, outputs, stride, expansion):
        super().__init__()
        hidden = inputs * expansion
        widen = [*conv_norm(inputs, hidden, 1), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*conv_norm(hidden, hidden, 3, stride, hidden), nn.ReLU6()]
        self.body = nn.Sequential(*widen, *depthwise, *conv_norm(hidden, outputs, 1))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.residual else self.body(x)


def mobilenet_v2():
    """MobileNetV2 at half the width, for 10 classes."""
    layers, inputs = [*conv_norm(3, 16, 3, 2), nn.ReLU6()], 16
    for expansion, outputs, count, first in (
        (1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2), (6, 32, 4, 2), (6, 48, 3, 1), (6, 80, 3, 2), (6, 160, 1, 1),
    ):
        for i in range(count):
            layers.append(Inverted(inputs, outputs, first if i == 0 else 1, expansion))
            inputs = outputs
    head = [*conv_norm(160, 1280, 1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 10)]
    return nn.Sequential(*layers, *head)


def vgg16():
    layers, inputs = [], 3
    for outputs in (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"):
        if outputs == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
    head = [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


class Block(nn.Module):
    """A transformer's block, normalised before (GPT) or after (BERT) each of its halves."""

    def __init__(self, width, heads, hidden, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))

    def feed(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        if self.causal:
            x = x + self.attend(self.ln1(x))
            return x + self.feed(self.ln2(x))
        x = self.ln1(x + self.attend(x))
        return self.ln2(x + self.feed(x))


class Transformer(nn.Module):
    """Logits for every token, or with `pooled` for the first one."""

    def __init__(self, vocabulary, length, width, heads, hidden, blocks, classes, causal, pooled):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, causal) for _ in range(blocks)))
        self.norm, self.head, self.pooled = nn.LayerNorm(width), nn.Linear(width, classes), pooled

    def forward(self, tokens):
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions))
        return self.head(x[:, 0] if self.pooled else x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(65, 64), nn.Linear(96, 65)
        self.lstm = nn.LSTM(64, 96, 2, batch_first=True)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def chargpt():
    return Transformer(65, 64, 128, 4, 512, 4, 65, causal=True, pooled=False)


def bert():
    return Transformer(1000, 64, 256, 4, 1024, 4, 2, causal=False, pooled=True)


NETWORKS = {
    "resnet18s": ("ResNet-18s, 32x32, batch 32", resnet18s, (32, 3, 32, 32), 10),
    "mobilenet_v2": ("MobileNetV2 0.5, 64x64, batch 16", mobilenet_v2, (16, 3, 64, 64), 10),
    "chargpt": ("CharGPT 4x128, 64 tokens, batch 16", chargpt, (16, 64), 65),
    "bert": ("BERT-small 4x256, 64 tokens, batch 8", bert, (8, 64), 2),
    "lstm": ("LSTM 2x96, 64 tokens, batch 16", Recurrent, (16, 64), 65),
    "vgg16": ("VGG-16, batch 4", vgg16, (4, 3, 224, 224), 1000),
}


def build(name):
    """The model, its input and its labels."""
    _, make, shape, classes = NETWORKS[name]
    torch.manual_seed(0)
    model = make().train()
    inputs = torch.rand(shape) - 0.5 if len(shape) == 4 else torch.arange(shape[0] * shape[1]).view(shape) % 17
    with torch.no_grad():
        labels = torch.arange(model(inputs).numel() // classes) % classes
    return model, inputs, labels


def training_step(name):
    model, inputs, labels = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def step():
        optimizer.zero_grad()
        logits = model(inputs)
        F.cross_entropy(logits.view(-1, logits.shape[-1]), labels).backward()
        optimizer.step()

    return step


def export(name, path):
    model, inputs, _ = build(name)
    torch.onnx.export(
        model, inputs, path, dynamo=False, opset_version=17, input_names=["input"], output_names=["output"],
        training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
    )
