"""Hopper's kernels (copy engine, wgmma) in whichever language: what they take, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from flash_rosetta.backend import Unsupported
from flash_rosetta.copy_engine import can_move
from flash_rosetta.layout import LaunchKey, Layout
from flash_rosetta.problem import Problem
from flash_rosetta.variants import ForwardTileSize


def can_use_tma(problem: Problem, *inputs: Layout) -> bool:
    """Whether Hopper's copy engine can move tiles of the inputs and of our outputs.

    fp32 has no use for it: its products need more than a copy.
    """
    halves = problem.dtype.itemsize == 2
    return problem.target == "sm_90" and halves and can_move(problem, *inputs)


def refused_by_hopper(problem: Problem) -> list[str]:
    """Why Hopper's kernels cannot run a problem, whatever its tensors' strides."""
    if problem.target != "sm_90":
        return [f"target {problem.target} is not sm_90, whose copy engine and wgmma it is about"]
    if problem.dtype == torch.float32:
        return ["dtype torch.float32: Hopper's kernel is for operands of 16 bits"]
    if not can_use_tma(problem):
        return [
            f"rows of head_dim {problem.head_dim} take {2 * problem.head_dim} bytes, and the copy "
            "engine moves multiples of 16"
        ]
    return []


def only_by_tma(name: str, recipe_of: Callable[[LaunchKey], Any]) -> Callable[[LaunchKey], Any]:
    """The recipes of the backend `name`, for tensors that the copy engine can move alone.

    For others they raise Unsupported: `why_not` knows no strides.
    """

    @lru_cache(maxsize=4096)
    def recipe_or_refusal(key: LaunchKey) -> Any:
        if not can_use_tma(key.problem, *filter(None, key.layouts)):
            reason = (
                "the copy engine cannot move q, k and v: it takes rows of unit stride, other "
                "strides that are multiples of 16 bytes, and memory aligned to 16; clones that are "
                "contiguous have all three"
            )
            raise Unsupported(name, [reason], key.problem)
        return recipe_of(key)

    return recipe_or_refusal


def tile_sizes() -> list[ForwardTileSize]:
    """One to three warpgroups, few keys to many, two and three tiles in flight."""
    return [
        ForwardTileSize(tile_q, tile_k, tile_q // 16, num_stages)
        for tile_q in (64, 128, 192)
        for tile_k in (32, 64, 80, 96, 128, 192)
        for num_stages in (2, 3)
    ]


def check_size(size: ForwardTileSize) -> None:
    """Raise ValueError for a size that warpgroups, their products and rings cannot have."""
    if size.tile_q not in (64, 128, 192) or size.num_warps != size.tile_q // 16:
        raise ValueError(f"tiles must have 64, 128 or 192 query rows, 16 for each warp; got {size}")
    if size.tile_k % 16 or not 16 <= size.tile_k <= 256:
        raise ValueError(f"tiles must have 16 to 256 keys, a multiple of 16; got {size}")
    if size.num_stages < 1:
        raise ValueError(f"tiles must have one stage or more; got {size}")
