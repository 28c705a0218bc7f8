"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from functools import lru_cache, partial

from flash_rosetta.backend import Backend
from flash_rosetta.cute_impl.backward import plan_backward
from flash_rosetta.cute_impl.compile_only import compile_only
from flash_rosetta.cute_impl.forward import forward_recipe, plan_forward, plan_with
from flash_rosetta.cute_impl.ladder import HOPPER_RUNGS, RUNGS, rung_recipe
from flash_rosetta.cute_impl.launch import Recipe
from flash_rosetta.cute_impl.tiles import (
    MOST_SHARED_BYTES,
    ForwardTile,
    forward_bytes,
    forward_registers,
    padded_head_dim,
)
from flash_rosetta.hopper import check_size, only_by_tma, refused_by_hopper
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem
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
def rung(shipped: Backend, name: str) -> Backend:
    """The backend of a rung, beside the one that ships. Raises ValueError for no rung's name."""
    check_rung(name)
    full_name = f"{shipped.name}{SEPARATOR}{name}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem)
        if name in (*HOPPER_RUNGS, "overlap", "atomics", "second-pass"):
            reasons += refused_by_hopper(problem)
        if name == "atomics":
            reasons += _refused_by_one_pass(problem)
        return reasons

    if name in RUNGS:
        plan = partial(plan_with, partial(rung_recipe, rung=name))
        failures = VISITS_ALL if RUNGS.index(name) < RUNGS.index("skip") else None
        return ForwardVariant(full_name, refusals, plan, compile_only, failures)
    if name == "overlap":
        return ForwardVariant(full_name, refusals, plan_forward, compile_only)
    backward = partial(plan_backward, one_pass=name == "atomics")
    return BackwardVariant(full_name, shipped, refusals, backward, compile_only)


@lru_cache
def with_tile(shipped: Backend, size: ForwardTileSize) -> Backend:
    """Hopper's forward with tiles of another size. Raises ValueError for what is none of its."""
    check_size(size)
    name = f"{shipped.name}{SEPARATOR}{size}"

    def refusals(problem: Problem) -> list[str]:
        reasons = shipped.why_not(problem) + refused_by_hopper(problem)
        return reasons or _refused_by_size(size, problem)

    def recipe_of(key: LaunchKey) -> Recipe:
        return forward_recipe(key, _tile(size, key.problem))

    plan = partial(plan_with, only_by_tma(name, recipe_of))
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


def _refused_by_one_pass(problem: Problem) -> list[str]:
    reasons = refused_by_atomics(problem)
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
