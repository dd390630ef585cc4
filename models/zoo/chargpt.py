"""Exports CharGPT, a small GPT over the characters of a text, from PyTorch to chargpt.onnx.

python models/zoo/chargpt.py [VOCABULARY]: 77 characters unless said otherwise. The weights are the initial ones; the
matrix of the last layer is its own, so that the model can be cut anywhere.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 64, 4, 2, 64, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).split(WIDTH, 2)
        heads = lambda t: t.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
        q, k, v = heads(q), heads(k), heads(v)
        scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
        shares = scores.masked_fill(self.later, float("-inf")).softmax(3)
        x = x + self.proj((shares @ v).transpose(1, 2).reshape(-1, LENGTH, WIDTH))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class CharGPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    vocabulary = int(sys.argv[1]) if len(sys.argv) > 1 else 77
    torch.manual_seed(0)
    model = CharGPT(vocabulary).train()
    torch.onnx.export(
        model,
        torch.zeros(BATCH, LENGTH, dtype=torch.int64),
        Path(__file__).with_name("chargpt.onnx"),
        dynamo=False,
        opset_version=17,
        input_names=["tokens"],
        output_names=["logits"],
        dynamic_axes={"tokens": {0: "batch"}, "logits": {0: "batch"}},
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )


if __name__ == "__main__":
    main()
