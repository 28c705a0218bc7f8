"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from torch import Tensor

from flash_rosetta.backend import Backend
from flash_rosetta.problem import Problem
from flash_rosetta.triton_impl.atomic_backward import plan_atomic_backward
from flash_rosetta.triton_impl.backward import plan_backward
from flash_rosetta.triton_impl.compile_only import compile_only
from flash_rosetta.triton_impl.forward import plan_forward
from flash_rosetta.triton_impl.ladder import RUNGS, cannot_specialize, plan_rung
from flash_rosetta.triton_impl.launch import Launch
from flash_rosetta.triton_impl.tiles import (
    MOST_REGISTERS,
    Tile,
    forward_accumulators,
    forward_bytes,
    most_shared_bytes,
    tiles_for,
)
from flash_rosetta.triton_impl.tiling import has_copy_engine
from flash_rosetta.variants import (
    SEPARATOR,
    VISITS_ALL,
    BackwardVariant,
    ForwardTileSize,
    ForwardVariant,
    check_rung,
    refused_by_atomics,
)


@lru_cache
def rung(shipped: Backend, name: str, full_name: str | None = None) -> Backend:
    """The backend of a rung, beside the one that ships, under "NAME:RUNG" or `full_name`.

    Raises ValueError for no rung's name.
    """
    check_rung(name)
    full_name = full_name or f"{shipped.name}{SEPARATOR}{name}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem)
        if name in ("tma", "specialize"):
            reasons += _refused_by_tma(problem)
        if name == "specialize" and not reasons:
            reasons += cannot_specialize(problem)
        if name == "atomics":
            reasons += refused_by_atomics(problem)
        return reasons

    if name in RUNGS:
        plan = partial(plan_rung, rung=name)
        failures = VISITS_ALL if RUNGS.index(name) < RUNGS.index("skip") else None
        return ForwardVariant(full_name, refusals, plan, compile_only, failures)
    if name == "overlap":
        return ForwardVariant(full_name, refusals, plan_forward, compile_only)
    backward = plan_atomic_backward if name == "atomics" else plan_backward
    return BackwardVariant(full_name, shipped, refusals, backward, compile_only)


def tile_sizes() -> list[ForwardTileSize]:
    """Few rows to many for one warpgroup or two, few keys to many, two to four tiles in flight."""
    return [
        ForwardTileSize(tile_q, tile_k, num_warps, num_stages)
        for tile_q, num_warps in ((64, 4), (128, 4), (128, 8))
        for num_stages in (2, 3, 4)
        for tile_k in (32, 64, 128)
    ]


@lru_cache
def with_tile(shipped: Backend, size: ForwardTileSize) -> Backend:
    """The forward with tiles of another size. Raises ValueError for what is none of its."""
    for name, value in (("tile_q", size.tile_q), ("tile_k", size.tile_k)):
        if value < 16 or value & (value - 1):
            raise ValueError(f"{name} must be a power of two, 16 at least; got {value} in {size}")
    if size.num_warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"num_warps must be 1, 2, 4, 8 or 16; got {size.num_warps} in {size}")
    if size.num_stages < 1:
        raise ValueError(f"num_stages must be 1 at least; got {size.num_stages} in {size}")

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem)
        if reasons or problem.target == "cpu":
            return reasons
        needed, most = shared_bytes(size, problem), most_shared_bytes(problem.target)
        if needed > most:
            reasons.append(
                f"shared memory of {size} at head_dim {problem.head_dim} is {needed} bytes, and "
                f"{problem.target} has {most}"
            )
        registers = forward_accumulators(_tile(size, problem), problem)
        if registers > MOST_REGISTERS:
            reasons.append(
                f"S and O of {size} at head_dim {problem.head_dim} are {registers} registers a "
                f"thread, which has {MOST_REGISTERS}"
            )
        return reasons

    name = f"{shipped.name}{SEPARATOR}{size}"

    def plan(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Launch, Tensor, Tensor]:
        return plan_forward(q, k, v, problem, _tile(size, problem))

    return ForwardVariant(name, refusals, plan, compile_only)


def shared_bytes(size: ForwardTileSize, problem: Problem) -> int:
    """Shared memory of one program of the forward, in bytes."""
    return forward_bytes(_tile(size, problem), problem)


def _tile(size: ForwardTileSize, problem: Problem) -> Tile:
    """The shipped tile in all but its size."""
    return replace(
        tiles_for(problem).forward,
        tile_q=size.tile_q,
        tile_k=size.tile_k,
        num_warps=size.num_warps,
        num_stages=size.num_stages,
    )


def _refused_by_tma(problem: Problem) -> list[str]:
    if has_copy_engine(problem.target):
        return []
    return [f"target {problem.target} has no copy engine, which this rung is about"]
