"""Variants of a backend's kernels, by name: the rungs of the ladder, and forward tiles by size.

"triton:skip" is the backend triton with the kernel of the rung "skip", "triton:64x128w8s2" its
forward with tiles of 64 query rows and 128 keys, 8 warps and 2 stages. A variant is a backend like
any other, and runs only when it is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flash_rosetta.backend import Backend
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
