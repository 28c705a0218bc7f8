"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from flash_rosetta.backend import Backend
from flash_rosetta.hopper import check_size, only_by_tma, refused_by_hopper
from flash_rosetta.layout import LaunchKey
from flash_rosetta.problem import Problem
from flash_rosetta.tilelang_impl import atomic_backward
from flash_rosetta.tilelang_impl.backward import plan_backward
from flash_rosetta.tilelang_impl.compile_only import compile_only
from flash_rosetta.tilelang_impl.forward import forward_recipe, plan_forward
from flash_rosetta.tilelang_impl.ladder import HOPPER_RUNGS, RUNGS, rung_recipe
from flash_rosetta.tilelang_impl.launch import Recipe
from flash_rosetta.tilelang_impl.tiles import (
    MOST_SHARED_BYTES,
    ForwardTile,
    hopper_forward_bytes,
    hopper_tile,
    padded_head_dim,
    register_demands,
)
from flash_rosetta.variants import (
    SEPARATOR,
    VISITS_ALL,
    BackwardVariant,
    ForwardTileSize,
    ForwardVariant,
    check_rung,
    refused_by_atomics,
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
            reasons += refused_by_hopper(problem)
        if name == "atomics":
            reasons += refused_by_atomics(problem)
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

    plan = partial(plan_forward, recipe_of=only_by_tma(name, recipe_of))
    return ForwardVariant(name, refusals, plan, compile_only)


def shared_bytes(size: ForwardTileSize, problem: Problem) -> int:
    """Shared memory of one program of Hopper's forward, in bytes."""
    return hopper_forward_bytes(_tile(size, problem), padded_head_dim(problem.head_dim))


def _tile(size: ForwardTileSize, problem: Problem) -> ForwardTile:
    return hopper_tile(size, padded_head_dim(problem.head_dim), problem.is_causal)


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
