"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor

from flash_rosetta.backend import Backend, Unsupported
from flash_rosetta.cute_impl.backward import plan_backward
from flash_rosetta.cute_impl.compile_only import compile_only
from flash_rosetta.cute_impl.forward import forward_recipe, plan_forward, plan_with
from flash_rosetta.cute_impl.ladder import HOPPER_RUNGS, RUNGS, rung_recipe
from flash_rosetta.cute_impl.launch import Launch, Recipe
from flash_rosetta.cute_impl.tiles import (
    MOST_SHARED_BYTES,
    ForwardTile,
    forward_bytes,
    forward_registers,
    padded_head_dim,
)
from flash_rosetta.cute_impl.tiling import can_use_tma
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem
from flash_rosetta.variants import (
    SEPARATOR,
    VISITS_ALL,
    BackwardVariant,
    ForwardTileSize,
    ForwardVariant,
    check_rung,
)


@lru_cache
def rung(shipped: Backend, name: str) -> Backend:
    """The backend of a rung, beside the one that ships. Raises ValueError for no rung's name."""
    check_rung(name)
    full_name = f"{shipped.name}{SEPARATOR}{name}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem)
        if name in (*HOPPER_RUNGS, "overlap", "atomics", "second-pass"):
            reasons += _refused_by_hopper(problem)
        if name == "atomics":
            reasons += _refused_by_atomics(problem)
        return reasons

    if name in RUNGS:
        plan = partial(plan_with, partial(rung_recipe, rung=name))
        failures = VISITS_ALL if RUNGS.index(name) < RUNGS.index("skip") else None
        return ForwardVariant(full_name, refusals, plan, compile_only, failures)
    if name == "overlap":
        return ForwardVariant(full_name, refusals, plan_forward, compile_only)
    backward = partial(plan_backward, one_pass=name == "atomics")
    return BackwardVariant(full_name, shipped, refusals, backward, compile_only)


def tile_sizes() -> list[ForwardTileSize]:
    """One to three warpgroups, few keys to many, two and three tiles in flight."""
    return [
        ForwardTileSize(tile_q, tile_k, tile_q // 16, num_stages)
        for num_stages in (2, 3)
        for tile_q in (64, 128, 192)
        for tile_k in (32, 64, 80, 96, 128, 192)
    ]


@lru_cache
def with_tile(shipped: Backend, size: ForwardTileSize) -> Backend:
    """Hopper's forward with tiles of another size. Raises ValueError for what is none of its."""
    if size.tile_q not in (64, 128, 192) or size.num_warps != size.tile_q // 16:
        raise ValueError(f"tiles must have 64, 128 or 192 query rows, 16 for each warp; got {size}")
    if size.tile_k % 16 or not 16 <= size.tile_k <= 256:
        raise ValueError(f"tiles must have 16 to 256 keys, a multiple of 16; got {size}")
    if size.num_stages < 1:
        raise ValueError(f"tiles must have one stage or more; got {size}")
    name = f"{shipped.name}{SEPARATOR}{size}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem) + _refused_by_hopper(problem)
        return reasons or _refused_by_size(size, problem)

    @lru_cache(maxsize=4096)
    def recipe_of(key: LaunchKey) -> Recipe:
        if not can_use_tma(key.problem, *key.layouts):
            reason = (
                "the copy engine cannot move q, k and v: it takes rows of unit stride, other "
                "strides that are multiples of 16 bytes, and memory aligned to 16"
            )
            raise Unsupported(name, [reason], key.problem)
        return forward_recipe(key, _tile(size, key.problem))

    def plan(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Launch, Tensor, Tensor]:
        return plan_with(recipe_of, q, k, v, problem)

    return ForwardVariant(name, refusals, plan, compile_only)


def shared_bytes(size: ForwardTileSize, problem: Problem) -> int:
    """Shared memory of one program of Hopper's forward, in bytes, less some for barriers."""
    return forward_bytes(_tile(size, problem), padded_head_dim(problem.head_dim))


def _tile(size: ForwardTileSize, problem: Problem) -> ForwardTile:
    """Alone, a warpgroup's programs come in twos; three take turns at a width of 64: as shipped."""
    return ForwardTile(
        size.tile_q,
        size.tile_k,
        num_stages=size.num_stages,
        programs=2 if size.tile_q == 64 else 1,
        take_turns=size.tile_q == 192 and padded_head_dim(problem.head_dim) == 64,
    )


def _refused_by_hopper(problem: Problem) -> list[str]:
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


def _refused_by_atomics(problem: Problem) -> list[str]:
    reasons = []
    if problem.deterministic:
        reasons.append("sums of dq come in any order, and deterministic results are asked for")
    if padded_head_dim(problem.head_dim) > 128:
        reasons.append(f"head_dim {problem.head_dim} is above 128, the most that one pass holds")
    return reasons


def _refused_by_size(size: ForwardTileSize, problem: Problem) -> list[str]:
    """Why tiles of a size do not fit a multiprocessor of Hopper."""
    tile, width = _tile(size, problem), padded_head_dim(problem.head_dim)
    what = f"{size} at head_dim {problem.head_dim}"
    reasons = []
    needed, most = shared_bytes(size, problem), MOST_SHARED_BYTES // tile.programs
    if needed > most:
        beside = ", which holds two such programs" if tile.programs > 1 else ""
        reasons.append(
            f"shared memory of {what} is {needed} bytes, and sm_90 has {most} for it{beside}"
        )
    registers = forward_registers(tile, width)
    if registers > tile.registers:
        reasons.append(
            f"{what} needs about {registers} registers a thread, and its warpgroups have "
            f"{tile.registers}"
        )
    return reasons
