"""What a backend may be able to do: named, so that it can be declared, held to, and counted.

A backend may have an attribute `capabilities`, a set of names from `OF_A_PROBLEM`. Where it has
one, `why_not` must agree: to refuse every problem of a declared capability is an error, and so is
to accept one of a capability that is not declared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from flash_rosetta import Problem, registry
from flash_rosetta.conformance.cases import BOTTOM_RIGHT, MASKS, TOP_LEFT, Lane
from flash_rosetta.problem import DTYPE_NAMES, target_of


@dataclass(frozen=True)
class Capability:
    """`is_asked_by` tells problems that need it, `example` are the fields that make one."""

    is_asked_by: Callable[[Problem], bool]
    example: dict[str, Any]


def _dtype(dtype: torch.dtype, allow_tf32: bool = False) -> Capability:
    return Capability(
        lambda p: (p.dtype, p.allow_tf32) == (dtype, allow_tf32),
        {"dtype": dtype, "allow_tf32": allow_tf32},
    )


def _sees_no_key(problem: Problem) -> bool:
    return problem.is_causal and problem.causal_offset < 0


OF_A_PROBLEM: dict[str, Capability] = {
    **{name: _dtype(dtype) for dtype, name in DTYPE_NAMES.items()},
    "tf32": _dtype(torch.float32, allow_tf32=True),
    "full": Capability(lambda p: not p.is_causal, {"is_causal": False}),
    "causal_top_left": Capability(
        lambda p: p.is_causal and p.causal_alignment == "top_left", TOP_LEFT
    ),
    "causal_bottom_right": Capability(
        lambda p: p.is_causal and p.causal_alignment == "bottom_right", BOTTOM_RIGHT
    ),
    "rows_without_keys": Capability(_sees_no_key, {**BOTTOM_RIGHT, "seqlen_q": 9, "seqlen_k": 5}),
    "grouped_queries": Capability(
        lambda p: p.num_kv_heads != p.num_heads, {"num_heads": 4, "num_kv_heads": 2}
    ),
    "other_value_width": Capability(
        lambda p: p.head_dim_v != p.head_dim, {"head_dim": 64, "head_dim_v": 32}
    ),
    "odd_head_dim": Capability(lambda p: p.head_dim % 8 > 0, {"head_dim": 33, "head_dim_v": 33}),
    "head_dim_above_128": Capability(
        lambda p: p.head_dim > 128, {"head_dim": 256, "head_dim_v": 256}
    ),
    "negative_scale": Capability(lambda p: p.scale < 0, {"scale": -0.5}),
    "backward": Capability(lambda p: p.needs_backward, {"needs_backward": True}),
    "deterministic": Capability(
        lambda p: p.deterministic, {"deterministic": True, "needs_backward": True}
    ),
}


def asked_by(problem: Problem) -> list[str]:
    """The capabilities that a problem needs."""
    return [name for name, capability in OF_A_PROBLEM.items() if capability.is_asked_by(problem)]


def contradictions(backend: str, lane: Lane, device: torch.device) -> list[str]:
    """Where what a backend declares is not what `why_not` says; empty if it declares nothing."""
    declared: Collection[str] | None = getattr(registry.get(backend), "capabilities", None)
    if declared is None:
        return []
    found = [
        f"{name!r} is no capability; known are {', '.join(OF_A_PROBLEM)}"
        for name in sorted(set(declared) - OF_A_PROBLEM.keys())
    ]
    for name, capability in OF_A_PROBLEM.items():
        reasons = _why_never(backend, capability, lane, device)
        if name in declared and reasons:
            found.append(f"{name!r} is declared and refused: {'; '.join(reasons)}")
        if name not in declared and not reasons:
            found.append(f"{name!r} is accepted and not declared")
    return found


def _why_never(backend: str, capability: Capability, lane: Lane, device: torch.device) -> list[str]:
    """Reasons to refuse the example whatever the dtype and mask; empty if some variant is taken."""
    reasons: list[str] = []
    for dtype, mask in product(DTYPE_NAMES, MASKS):
        problem = replace(lane.problem(5, dtype=dtype, **mask), target=target_of(device))
        reasons = registry.why_not(backend, replace(problem, **capability.example))
        if not reasons:
            break
    return reasons
