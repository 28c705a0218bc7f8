"""The variants of this folder's kernels: rungs of the ladder, and the forward with other tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from flash_rosetta.backend import Backend, KernelReport, Unsupported
from flash_rosetta.kernels import MAX_HEAD_DIM
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
from flash_rosetta.variants import RUNGS as LADDER
from flash_rosetta.variants import SEPARATOR, ForwardTileSize

Refusals = Callable[[Problem], list[str]]

VISITS_ALL = {
    "test_nan_in_a_value_stays_out_of_earlier_tiles": "it visits every key tile, skipping none"
}
"""What the suite asks of kernels that skip key tiles, which rungs below skip do not."""


class ForwardVariant:
    """A backend with another forward kernel and no backward.

    `refusals`: why the kernel cannot run a problem; `recipe_of`: the kernel. `tma`: it takes only
    what Hopper's copy engine can move, and forward raises Unsupported for other tensors.
    """

    def __init__(
        self,
        name: str,
        refusals: Refusals,
        recipe_of: Callable[[LaunchKey], Recipe],
        tma: bool,
        expected_failures: dict[str, str] | None = None,
    ):
        self.name = name
        self.refusals = refusals
        self.recipe_of = recipe_of
        self.tma = tma
        self.expected_failures = expected_failures or {}

    def why_not(self, problem: Problem) -> list[str]:
        reasons = self.refusals(problem)
        if self.tma:
            reasons += _refused_by_hopper(problem)
        if problem.needs_backward:
            reasons.append("it has no backward: call it on tensors that need no gradient")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launch, o, lse = self._plan(q, k, v, problem)
        launch.run()
        return o, lse

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
        raise NotImplementedError(f"backend {self.name!r} has no backward, as its why_not says")

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        return compile_only(problem, forward=self._plan)

    def _plan(
        self, q: Tensor, k: Tensor, v: Tensor, problem: Problem
    ) -> tuple[Launch, Tensor, Tensor]:
        return plan_forward(q, k, v, problem, self._recipe)

    def _recipe(self, key: LaunchKey) -> Recipe:
        if self.tma and not can_use_tma(key.problem, *key.layouts):
            reason = (
                "the copy engine cannot move q, k and v: it takes rows of unit stride, other "
                "strides that are multiples of 16 bytes, and memory aligned to 16"
            )
            raise Unsupported(self.name, [reason], key.problem)
        return self.recipe_of(key)


class BackwardVariant:
    """A backend whose backward is a rung, and whose forward is the shipped one's.

    `refusals`: why it cannot run a problem that needs gradients. `plan`: its launches, and dq, dk
    and dv, where `finish` makes dq of what the launches fill and q.
    """

    def __init__(
        self,
        name: str,
        shipped: Backend,
        refusals: Refusals,
        plan: Callable[..., tuple[list[Launch], Tensor, Tensor, Tensor]],
        finish: Callable[[Tensor, Tensor], Tensor],
    ):
        self.name = name
        self.shipped = shipped
        self.refusals = refusals
        self.plan = plan
        self.finish = finish

    def why_not(self, problem: Problem) -> list[str]:
        reasons = self.refusals(problem)
        if not problem.needs_backward:
            reasons.append("it is a backward: call it on tensors that need gradients")
        return reasons

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        return self.shipped.forward(q, k, v, problem)

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
        launches, dq, dk, dv = self.plan(do, dlse, q, k, v, o, lse, problem)
        for launch in launches:
            launch.run()
        return self.finish(dq, q), dk, dv

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        return compile_only(problem, backward=self.plan)


@lru_cache
def rung(shipped: Backend, name: str) -> Backend:
    """The backend of a rung, beside the one that ships. Raises ValueError for no rung's name."""
    full_name = f"{shipped.name}{SEPARATOR}{name}"
    if name in RUNGS:
        return ForwardVariant(
            full_name,
            shipped.why_not,
            partial(rung_recipe, rung=name),
            tma=name in HOPPER_RUNGS,
            expected_failures=VISITS_ALL if RUNGS.index(name) < RUNGS.index("skip") else None,
        )
    if name == "overlap":
        return ForwardVariant(full_name, shipped.why_not, forward_recipe, tma=True)
    if name == "second-pass":
        return BackwardVariant(full_name, shipped, shipped.why_not, plan_backward, lambda dq, q: dq)
    if name == "atomics":
        return BackwardVariant(
            full_name,
            shipped,
            lambda problem: shipped.why_not(problem) + _refused_by_atomics(problem),
            atomic_backward.plan_backward,
            atomic_backward.rounded,
        )
    names = ", ".join(each.name for each in LADDER)
    raise ValueError(f"a rung must be one of {names}; got {name!r}")


def tile_sizes() -> list[ForwardTileSize]:
    """One to three warpgroups, few keys to many, two and three tiles in flight."""
    return [
        ForwardTileSize(tile_q, tile_k, tile_q // 16, num_stages)
        for tile_q in (64, 128, 192)
        for tile_k in (32, 64, 96, 128, 192)
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

    def refusals(problem: Problem) -> list[str]:
        return shipped.why_not(problem) + _refused_by_size(size, problem)

    def recipe_of(key: LaunchKey) -> Recipe:
        return forward_recipe(key, _tile(size, key.problem))

    name = f"{shipped.name}{SEPARATOR}{size}"
    return ForwardVariant(name, refusals, recipe_of, tma=True)


def shared_bytes(size: ForwardTileSize, problem: Problem) -> int:
    """Shared memory of one program of Hopper's forward, in bytes."""
    return hopper_forward_bytes(_tile(size, problem), padded_head_dim(problem.head_dim))


def _tile(size: ForwardTileSize, problem: Problem) -> ForwardTile:
    return hopper_tile(size, padded_head_dim(problem.head_dim), problem.is_causal)


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
    if problem.target != "sm_90" or problem.head_dim > MAX_HEAD_DIM:
        return []  # refused already
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
