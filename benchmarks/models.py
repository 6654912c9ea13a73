"""The models that the benchmarks train: a GPT, MLPs, ResNet-18 and a network over trees."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NormFactory = Callable[[int], nn.Module]


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        fed: Tensor = self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))
        return x + fed


class Gpt(nn.Module):
    """`[rows, length]` token ids in, `[rows, length, vocabulary]` logits out."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Mlp(nn.Module):
    """`depth` residual layers of Linear and ReLU."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class PlainMlp(nn.Module):
    """`depth` layers of Linear and ReLU that keep the scale of their input."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._layer(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    @staticmethod
    def _layer(width: int) -> nn.Sequential:
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.ReLU())


class TreeNet(nn.Module):
    """A recursive network (Socher et al. 2011) over binary trees, a different one for each row.

    A row of `[rows, 2 * leaves - 1]` integers is `leaves` words, then the order in which neighbours
    are merged into one: k merges those at k and k + 1. Out come `[rows, classes]` logits. No two
    rows have a tree in common, so rows are computed one after the other by small operators.
    """

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.merge = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.stack([self._of_tree(row) for row in rows])

    def _of_tree(self, row: Tensor) -> Tensor:
        leaves = (len(row) + 1) // 2
        nodes = list(self.words(row[:leaves]).unbind())
        for place in row[leaves:].tolist():
            pair = torch.cat(nodes[place : place + 2])
            nodes[place : place + 2] = [torch.tanh(self.merge(pair))]
        logits: Tensor = self.head(nodes[0])
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, with the norm that `norm(channels)` makes."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: NormFactory) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            project = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """`[rows, 3, h, w]` images in, `[rows, classes]` logits out; the stem for small images."""

    def __init__(self, classes: int, width: int, norm: NormFactory) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width))
        self.blocks = nn.ModuleList()
        channels_in = width
        for stage in range(4):
            channels = width * 2**stage
            self.blocks.append(BasicBlock(channels_in, channels, 1 if stage == 0 else 2, norm))
            self.blocks.append(BasicBlock(channels, channels, 1, norm))
            channels_in = channels
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
