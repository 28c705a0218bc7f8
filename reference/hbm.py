"""Tiles in and out of HBM: the only door between the loops and the whole tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional as F


@dataclass
class Traffic:
    """Elements read from and written to HBM, by tensor. Padding that a load adds is not counted."""

    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)


class Hbm:
    """Whole tensors by name, given as [batch, heads, seqlen, width] (lse and delta: width 1).

    Tensors with one head per query head are seen one member `g` of each group at a time, query head
    kv_head * group_size + g for every kv_head; so every tile is [batch, num_kv_heads, ...].
    """

    def __init__(self, group_size: int, traffic: Traffic | None = None, **tensors: Tensor):
        self.group_size = group_size
        self.traffic = Traffic() if traffic is None else traffic
        self.tensors = tensors

    def load(self, name: str, start: int, size: int, g: int | None = None) -> Tensor:
        """Rows start to start + size, zeros past the end: a tile has one shape, as in a kernel."""
        rows = self._rows(name, start, size, g)
        self.traffic.reads[name] += rows.numel()
        return F.pad(rows, (0, 0, 0, size - rows.shape[-2]))

    def store(self, name: str, start: int, tile: Tensor, g: int | None = None) -> None:
        """Write a tile, in the tensor's dtype; its rows past the end go nowhere."""
        rows = self._rows(name, start, tile.shape[-2], g)
        self.traffic.writes[name] += rows.numel()
        rows.copy_(tile[..., : rows.shape[-2], :])

    def store_all(self, name: str, value: float) -> None:
        """Fill a whole tensor."""
        self.traffic.writes[name] += self.tensors[name].numel()
        self.tensors[name].fill_(value)

    def _rows(self, name: str, start: int, size: int, g: int | None) -> Tensor:
        x = self.tensors[name]
        heads = x if g is None else x[:, g :: self.group_size]
        return heads[:, :, start : start + size]
