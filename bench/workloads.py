"""What is raced: a grid of standard normal inputs, and inputs captured from a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flash_rosetta.problem import Direction, Inputs, Problem, target_of

CAPTURE = Path(__file__).parent / "data" / "minilm_l6.safetensors"

TOKENS = 16384
"""Tokens of one call: batch x seqlen, as the FlashAttention papers do it."""

HIDDEN = 2048
"""num_heads x head_dim in the grid, the papers' again."""

GRID_HEAD_DIMS = (64, 128, 256)
GRID_SEQLENS = (512, 2048, 8192, 16384)

CPU_HEADS = 2
"""Of the captured heads, those that race on a CPU, where Triton's interpreter takes its time."""


@dataclass(frozen=True)
class Workload:
    """Named inputs of one problem. `load` makes them on a device, the same ones every time."""

    name: str
    problem: Problem
    load: Callable[[torch.device], Inputs]

    def problem_for(self, direction: Direction) -> Problem:
        """The problem as `attention` would pose it for one direction."""
        return replace(self.problem, needs_backward=direction == "backward")


def workloads(
    which: str,
    device: torch.device,
    head_dims: tuple[int, ...] = (),
    seqlens: tuple[int, ...] = (),
) -> list[Workload]:
    """The workloads of "grid", "captured" or "all" for a device, empty filters taking everything.

    A CPU gets the captured ones alone, at a tiny size. Raises ValueError when nothing is left.
    """
    found: list[Workload] = []
    if which in ("captured", "all"):
        found += captured(device)
    if which in ("grid", "all") and device.type == "cuda":
        found += grid(device)
    kept = [
        w
        for w in found
        if (not head_dims or w.problem.head_dim in head_dims)
        and (not seqlens or w.problem.seqlen_q in seqlens)
    ]
    if not kept:
        sizes = sorted({(w.problem.head_dim, w.problem.seqlen_q) for w in found})
        raise ValueError(
            f"no workload of {which!r} on {device.type} has head_dim in {list(head_dims) or 'any'} "
            f"and seqlen in {list(seqlens) or 'any'}; (head_dim, seqlen) there: {sizes or 'none'}"
        )
    return kept


def grid(device: torch.device) -> Iterator[Workload]:
    """head_dim x causal x seqlen, 16k tokens each, bf16, standard normal."""
    for head_dim in GRID_HEAD_DIMS:
        for is_causal in (False, True):
            for seqlen in GRID_SEQLENS:
                problem = Problem(
                    batch=TOKENS // seqlen,
                    num_heads=HIDDEN // head_dim,
                    seqlen_q=seqlen,
                    head_dim=head_dim,
                    is_causal=is_causal,
                    target=target_of(device),
                )
                yield Workload("grid", problem, problem.inputs)


def captured(device: torch.device) -> Iterator[Workload]:
    """Each captured attention call. On a GPU in bf16, as it is and then tiled to a full card.

    Tiling repeats the call along batch until it holds 16k tokens: each copy has its own memory and
    is computed anew, so the time is that of a large batch, though its values repeat. On a CPU: the
    first two heads, in fp32, which holds the captured bf16 numbers exactly. Everywhere as views
    of [batch, seqlen, num_heads, head_dim], the layout that the model itself has.
    """
    from safetensors import safe_open

    with safe_open(CAPTURE, "pt") as file:
        names = sorted({key.rpartition(".")[0] for key in file.keys()})  # noqa: SIM118 (no mapping)
    for name in names:
        title = f"captured-minilm-l6-{name.replace('.', '-')}"
        if device.type == "cuda":
            yield _captured(title, name, device)
            seqlen = _read(name)[0].shape[1]
            yield _captured(f"{title}-tiled", name, device, copies=TOKENS // seqlen)
        else:
            yield _captured(title, name, device, num_heads=CPU_HEADS, dtype=torch.float32)


def _captured(
    title: str,
    name: str,
    device: torch.device,
    *,
    copies: int = 1,
    num_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Workload:
    def load(device: torch.device) -> Inputs:
        q, k, v, do = (
            t[:, :, :num_heads].to(device, dtype).repeat(copies, 1, 1, 1).transpose(1, 2)
            for t in _read(name)
        )
        return Inputs(q, k, v, do, dlse=torch.zeros(q.shape[:3], device=device))

    _, seqlen, heads, head_dim = _read(name)[0].shape
    problem = Problem(
        batch=copies,
        num_heads=num_heads or heads,
        seqlen_q=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        target=target_of(device),
    )
    return Workload(title, problem, load)


def _read(name: str) -> tuple[Tensor, ...]:
    """q, k, v, do of one captured call as the model has them, [1, seqlen, num_heads, head_dim]."""
    from safetensors import safe_open

    with safe_open(CAPTURE, "pt") as file:
        return tuple(file.get_tensor(f"{name}.{t}") for t in ("q", "k", "v", "do"))
