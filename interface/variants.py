"""Variants of a backend's kernels, by name: the rungs of the ladder, and forward tiles by size.

"triton:skip" is the backend triton with the kernel of the rung "skip", "triton:64x128w8s2" its
forward with tiles of 64 query rows and 128 keys, 8 warps and 2 stages. A variant is a backend like
any other, and runs only when it is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flash_rosetta.backend import Backend, KernelReport
from flash_rosetta.problem import Direction, Problem

SEPARATOR = ":"
"""Between a backend's name and a variant's."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: a kernel that `adds` something to the rung below it."""

    name: str
    direction: Direction
    adds: str


RUNGS = (
    Rung("baseline", "forward", "nothing yet: 16 x 16 tiles, every tile computed and masked"),
    Rung("tiles", "forward", "tiles, warps and stages tuned for the card"),
    Rung("skip", "forward", "key tiles that no row sees are not visited"),
    Rung("mask", "forward", "scores are masked only in tiles that some row does not see whole"),
    Rung("exp2", "forward", "exp2 in place of exp, the scale folded into its multiply-add"),
    Rung("cast", "forward", "P rounded to the operands' dtype, before: kept in two halves"),
    Rung("tma", "forward", "tiles moved by the copy engine, products of a whole warpgroup"),
    Rung("specialize", "forward", "a warp of its own that only loads"),
    Rung("overlap", "forward", "softmax beside matrix products: what the backend ships"),
    Rung("second-pass", "backward", "dq by a second pass, which computes the scores again"),
    Rung("atomics", "backward", "dq added to memory by the pass over keys"),
)
"""The ladder, from the bottom; each rung of a direction has all that the ones before it have.

The backward's two rungs are alternatives, each with everything else that its backend ships.
"""


@dataclass(frozen=True, order=True)
class ForwardTileSize:
    """Query rows and key rows that a program of the forward holds, its warps and its stages.

    `num_warps` counts those that compute; `num_stages` the key and value tiles in flight.
    """

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.tile_q}x{self.tile_k}w{self.num_warps}s{self.num_stages}"

    @classmethod
    def parse(cls, text: str) -> ForwardTileSize | None:
        """The size whose str is `text`; None if it is none."""
        match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", text)
        return cls(*map(int, match.groups())) if match else None


@runtime_checkable
class Varied(Protocol):
    """A backend whose kernels come in variants."""

    def rung(self, name: str) -> Backend:
        """The backend of one of RUNGS, called "NAME:RUNG".

        It refuses, by `why_not`, the direction that the rung is not of and, if the language has no
        such thing, every problem. Raises ValueError for a name that is no rung.
        """
        ...

    def tile_sizes(self, problem: Problem) -> list[ForwardTileSize]:
        """The sizes that a sweep tries, those that do not fit the card included."""
        ...

    def with_tile(self, size: ForwardTileSize) -> Backend:
        """The shipped forward with other tiles, called "NAME:SIZE"; refuses to be differentiated.

        Raises ValueError for a size that its kernel cannot take at all (rows that its warps do not
        divide); what only does not fit a card is refused by `why_not`.
        """
        ...

    def shared_bytes(self, size: ForwardTileSize, problem: Problem) -> int:
        """Shared memory of one program of the forward, in bytes, by arithmetic alone."""
        ...


Refusals = Callable[[Problem], list[str]]
Plan = Callable[..., Any]
Compile = Callable[..., list[KernelReport]]

VISITS_ALL = {
    "test_nan_in_a_value_stays_out_of_earlier_tiles": "it visits every key tile, skipping none"
}
"""`expected_failures` of rungs below skip: what the suite asks of kernels that skip key tiles."""

LACKS_BACKWARD = "it has no backward: call it on tensors that need no gradient"
IS_BACKWARD = "it is a backward: call it on tensors that need gradients"


class ForwardVariant:
    """A backend with another forward kernel and no backward.

    Args:
        refusals: why its kernel cannot run a problem.
        plan: plan(q, k, v, problem) gives its launch, o and lse.
        compile_only: the backend's own, which takes `forward=plan`.
        expected_failures: see the suite.
    """

    def __init__(
        self,
        name: str,
        refusals: Refusals,
        plan: Plan,
        compile_only: Compile,
        expected_failures: Mapping[str, str] | None = None,
    ):
        self.name = name
        self.refusals = refusals
        self.plan = plan
        self.compiles = compile_only
        self.expected_failures = dict(expected_failures or {})

    def why_not(self, problem: Problem) -> list[str]:
        return self.refusals(problem) + [LACKS_BACKWARD] * problem.needs_backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        launch, o, lse = self.plan(q, k, v, problem)
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
        return self.compiles(problem, forward=self.plan)


class BackwardVariant:
    """A backend whose backward is a rung, and whose forward is the shipped one's.

    Args:
        refusals: why it cannot run a problem that needs gradients.
        plan: plan(do, dlse, q, k, v, o, lse, problem) gives its launches, dq, dk and dv.
        compile_only: the backend's own, which takes `backward=plan`.
    """

    def __init__(
        self, name: str, shipped: Backend, refusals: Refusals, plan: Plan, compile_only: Compile
    ):
        self.name = name
        self.shipped = shipped
        self.refusals = refusals
        self.plan = plan
        self.compiles = compile_only

    def why_not(self, problem: Problem) -> list[str]:
        return self.refusals(problem) + [IS_BACKWARD] * (not problem.needs_backward)

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
        return dq, dk, dv

    def compile_only(self, problem: Problem) -> list[KernelReport]:
        return self.compiles(problem, backward=self.plan)


def check_rung(name: str) -> None:
    """Raise ValueError for what is no rung's name."""
    if name not in (rung.name for rung in RUNGS):
        raise ValueError(
            f"a rung must be one of {', '.join(rung.name for rung in RUNGS)}; got {name!r}"
        )


def refused_by_atomics(problem: Problem) -> list[str]:
    """Why a backward that adds dq to memory cannot run a problem."""
    reasons = []
    if problem.dtype == torch.float32:
        reasons.append("dtype torch.float32: the backward with atomics is for fp16 and bf16")
    if problem.deterministic:
        reasons.append("atomics add to dq in any order, and deterministic results are asked for")
    return reasons


def variant_of(backend: Backend, variant: str) -> Backend:
    """The variant of `backend` that "NAME:variant" names. Raises ValueError for any other name."""
    if not isinstance(backend, Varied):
        raise ValueError(f"backend {backend.name!r} has no variants, got {variant!r}")
    size = ForwardTileSize.parse(variant)
    if size is not None:
        return backend.with_tile(size)
    if variant not in (rung.name for rung in RUNGS):
        rungs = ", ".join(rung.name for rung in RUNGS)
        raise ValueError(
            f"a variant of {backend.name!r} must be one of {rungs}, or tiles such as "
            f"64x128w8s2; got {variant!r}"
        )
    return backend.rung(variant)
