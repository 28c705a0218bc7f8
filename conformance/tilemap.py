"""Shows where a tensor is wrong, tile by tile: which tiles points to which loop is at fault."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_rosetta.reference.budget import ROW_FLOOR

TILE = 64
"""Rows and columns under one character."""

MAX_WIDTH = 96
"""Characters a line; of longer sequences the first tiles are shown."""

MAX_HEADS = 6
"""Wrong heads listed by index."""


def tile_map(name: str, got: Tensor, want: Tensor, row_budget: float) -> str:
    """The worst head of an output as text, one character a tile.

    A line is a tile of columns, its characters are the tiles of rows from first to last: "." good,
    "x" some row is wrong, "?" not finite where it should be or the reverse.

    Args:
        name: "lse" is judged absolutely, all others relative to a row's size.
        got, want: [batch, heads, seqlen] or [batch, heads, seqlen, columns].
        row_budget: the error from which a row is wrong.
    """
    if name == "lse":
        got, want = got[..., None], want[..., None]
    got, want = got.double(), want.double()
    finite = got.isfinite() & want.isfinite()
    alike = finite | (got == want) | (got.isnan() & want.isnan())
    strange = _any_row(_column_tiles((~alike).double()) > 0)
    error = _column_tiles((got - want).where(finite, 0).square()).sqrt()
    wrong = _any_row(error > row_budget * _row_size(name, want))
    bad = wrong | strange
    batch, head = divmod(int(bad.flatten(2).sum(-1).argmax()), got.shape[1])
    symbol = (wrong.int() + 2 * strange)[batch, head].clamp(max=2)
    lines = ["".join(".x?"[i] for i in tiles) for tiles in symbol.T.tolist()]
    shown = [f"    {line[:MAX_WIDTH]}{'...' * (len(line) > MAX_WIDTH)}" for line in lines]
    return "\n".join([f"  {_heads(bad)}; tiles of {TILE} x {TILE} in [{batch}, {head}]:", *shown])


def _heads(bad: Tensor) -> str:
    """How many and which (batch, head) are wrong."""
    found = bad.flatten(2).any(-1).nonzero().tolist()
    listed = ", ".join(map(str, found[:MAX_HEADS])) + ", ..." * (len(found) > MAX_HEADS)
    return f"wrong in {len(found)} of {bad.shape[0] * bad.shape[1]} (batch, head): {listed}"


def _row_size(name: str, want: Tensor) -> Tensor | float:
    """What a row's error is measured against."""
    if name == "lse":
        return 1.0
    square = want.where(want.isfinite(), 0).square()
    floor = ROW_FLOOR * square.mean().sqrt()
    return torch.maximum(square.mean(-1, keepdim=True).sqrt(), floor)


def _column_tiles(x: Tensor) -> Tensor:
    """Mean over each tile of columns, [..., rows, column tiles], a ragged one over what it has."""

    def sums(t: Tensor) -> Tensor:
        return pad(t, (0, -t.shape[-1] % TILE)).unflatten(-1, (-1, TILE)).sum(-1)

    return sums(x) / sums(torch.ones_like(x))


def _any_row(wrong: Tensor) -> Tensor:
    """True for the tiles of rows that hold a wrong row, [..., row tiles, column tiles]."""
    return pad(wrong, (0, 0, 0, -wrong.shape[-2] % TILE)).unflatten(-2, (-1, TILE)).any(-2)
