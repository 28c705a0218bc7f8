"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from flash_rosetta.backend import Backend, Unsupported
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl import atomic_backward
from flash_rosetta.tilelang_impl.backward import plan_backward
from flash_rosetta.tilelang_impl.compile_only import compile_only
from flash_rosetta.tilelang_impl.forward import forward_recipe, plan_forward
from flash_rosetta.tilelang_impl.ladder import HOPPER_RUNGS, RUNGS, rung_recipe
from flash_rosetta.tilelang_impl.launch import Launch, Recipe
from flash_rosetta.tilelang_impl.tiles import (
    MOST_SHARED_BYTES,
    ForwardTile,
    hopper_forward_bytes,
    hopper_tile,
    padded_head_dim,
    register_demands,
)
from flash_rosetta.tilelang_impl.tiling import can_use_tma
from flash_rosetta.variants import (
    SEPARATOR,
    VISITS_ALL,
    BackwardVariant,
    ForwardTileSize,
    ForwardVariant,
    check_rung,
)


class AtomicBackward(BackwardVariant):
    """The rung atomics: its launches leave sums of dq, which are rounded last."""

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq_sums, dk, dv = super().backward(do, dlse, q, k, v, o, lse, problem)
        return atomic_backward.rounded(dq_sums, q), dk, dv


@lru_cache
def rung(shipped: Backend, name: str) -> Backend:
    """The backend of a rung, beside the one that ships. Raises ValueError for no rung's name."""
    check_rung(name)
    full_name = f"{shipped.name}{SEPARATOR}{name}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem)
        if name in (*HOPPER_RUNGS, "overlap"):
            reasons += _refused_by_hopper(problem)
        if name == "atomics":
            reasons += _refused_by_atomics(problem)
        return reasons

    if name in RUNGS:
        plan = partial(plan_forward, recipe_of=partial(rung_recipe, rung=name))
        failures = VISITS_ALL if RUNGS.index(name) < RUNGS.index("skip") else None
        return ForwardVariant(full_name, refusals, plan, compile_only, failures)
    if name == "overlap":
        return ForwardVariant(full_name, refusals, plan_forward, compile_only)
    if name == "atomics":
        plan = atomic_backward.plan_backward
        return AtomicBackward(full_name, shipped, refusals, plan, compile_only)
    return BackwardVariant(full_name, shipped, refusals, plan_backward, compile_only)


def tile_sizes() -> list[ForwardTileSize]:
    """One to three warpgroups, few keys to many, two and three tiles in flight."""
    return [
        ForwardTileSize(tile_q, tile_k, tile_q // 16, num_stages)
        for tile_q in (64, 128, 192)
        for tile_k in (32, 64, 80, 96, 128, 192)
        for num_stages in (2, 3)
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

    def recipe_of(key: LaunchKey) -> Recipe:
        return forward_recipe(key, _tile(size, key.problem))

    return ForwardVariant(name, refusals, _tma_only(name, recipe_of), compile_only)


def shared_bytes(size: ForwardTileSize, problem: Problem) -> int:
    """Shared memory of one program of Hopper's forward, in bytes."""
    return hopper_forward_bytes(_tile(size, problem), padded_head_dim(problem.head_dim))


def _tile(size: ForwardTileSize, problem: Problem) -> ForwardTile:
    return hopper_tile(size, padded_head_dim(problem.head_dim), problem.is_causal)


def _tma_only(
    name: str, recipe_of: Callable[[LaunchKey], Recipe]
) -> Callable[..., tuple[Launch, Tensor, Tensor]]:
    """The plan of a kernel that takes only tensors which the copy engine can move."""

    def recipe_or_refusal(key: LaunchKey) -> Recipe:
        if not can_use_tma(key.problem, *key.layouts):
            reason = (
                "the copy engine cannot move q, k and v: it takes rows of unit stride, other "
                "strides that are multiples of 16 bytes, and memory aligned to 16"
            )
            raise Unsupported(name, [reason], key.problem)
        return recipe_of(key)

    return partial(plan_forward, recipe_of=recipe_or_refusal)


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
    if problem.dtype == torch.float32:
        reasons.append("dtype torch.float32: the backward with atomics is for fp16 and bf16")
    if problem.deterministic:
        reasons.append("atomics add to dq in any order, and deterministic results are asked for")
    return reasons


def _refused_by_size(size: ForwardTileSize, problem: Problem) -> list[str]:
    """Why tiles of a size do not fit a multiprocessor of Hopper."""
    width = padded_head_dim(problem.head_dim)
    tile = _tile(size, problem)
    what = f"{size} at head_dim {problem.head_dim}"
    reasons = []
    needed = hopper_forward_bytes(tile, width)
    if needed > MOST_SHARED_BYTES:
        reasons.append(
            f"shared memory of {what} is {needed} bytes, and sm_90 has {MOST_SHARED_BYTES}"
        )
    reasons += [
        f"registers of {what}: {part} take about {needed} of a thread's {there}"
        for part, needed, there in register_demands(tile, width, problem.is_causal)
        if needed > there
    ]
    return reasons
