"""A small GPT: a decoder of pre-norm blocks, whose attention is whatever is put into it.

Sizes of one layer: x [batch, seqlen, width]; q, k, v [batch, num_heads, seqlen, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of q, k and v, each [batch, num_heads, seqlen, head_dim]."""


@dataclass(frozen=True)
class Sizes:
    """Of a model and of the batches that it learns from."""

    layers: int
    num_heads: int
    head_dim: int
    seqlen: int
    batch: int
    vocabulary: int = 256  # bytes

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim


class Block(nn.Module):
    """x + attention(norm(x)), then that + mlp(norm(that))."""

    def __init__(self, sizes: Sizes, attend: Attend):
        super().__init__()
        self.sizes = sizes
        self.attend = attend
        width = sizes.width
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seqlen, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        heads = batch, seqlen, 3, self.sizes.num_heads, self.sizes.head_dim
        q, k, v = qkv.view(heads).permute(2, 0, 3, 1, 4)  # views: no copy is made for attention
        o = self.attend(q, k, v).transpose(1, 2).reshape(batch, seqlen, width)
        x = x + self.project(o)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """Bytes [batch, seqlen] to the logits of the bytes that follow them."""

    def __init__(self, sizes: Sizes, attend: Attend):
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.seqlen, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, attend) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        return self.head(self.norm(self.blocks(x)))

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each byte given those before it; tokens [batch, seqlen + 1]."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
