"""What runs where, as Markdown, from what each backend's `why_not` answers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import torch

from flash_rosetta import registry
from flash_rosetta.problem import DTYPE_NAMES, Problem

TARGETS = {
    "cpu": "CPU",
    "sm_80": "sm_80 (A100)",
    "sm_89": "sm_89 (L40S, RTX 4090)",
    "sm_90": "sm_90 (H100, H200)",
    "sm_100": "sm_100 (B200)",
}
HEAD_DIMS = (*range(1, 257), 512)


def support_markdown() -> str:
    """A table of backends by targets, and every reason for what is missing from it.

    The backends are this project's own, so that what else is installed does not show. Raises
    Unsupported if one of them cannot be loaded: its row would be a guess.
    """
    names = sorted(
        {
            entry.name
            for entry in entry_points(group=registry.ENTRY_POINT_GROUP)
            if entry.value.startswith("flash_rosetta.")
        }
    )
    lines = [
        "| backend | " + " | ".join(TARGETS.values()) + " |",
        "| --- " * (1 + len(TARGETS)) + "|",
    ]
    for name in names:
        cells = " | ".join(_cell(name, target) for target in TARGETS)
        lines.append(f"| `{name}` | {cells} |")
    reasons = [f"- `{name}`: {reason}" for name in names for reason in _reasons(name)]
    if reasons:
        lines += ["", "Each no, in the backend's own words:", "", *reasons]
    return "\n".join(lines)


def _cell(name: str, target: str) -> str:
    """ "fp16 bf16, head_dim 1 to 256", with "forward only" where that is so, or "no"."""
    forward = _supported(name, target, needs_backward=False)
    if not forward:
        return "no"
    by_head_dims: dict[str, list[str]] = {}
    for dtype, head_dims in forward.items():
        by_head_dims.setdefault(_ranges(head_dims), []).append(dtype)
    text = "; ".join(f"{' '.join(d)}, {r}" for r, d in by_head_dims.items())
    backward = _supported(name, target, needs_backward=True)
    if not backward:
        return f"{text}, forward only"
    if backward != forward:
        parts = (f"{dtype}, {_ranges(head_dims)}" for dtype, head_dims in backward.items())
        return f"{text}; backward: {'; '.join(parts)}"
    return text


def _supported(name: str, target: str, needs_backward: bool) -> dict[str, list[int]]:
    """The head_dims that run, by dtype."""
    backend = registry.get(name)
    found = {
        short: [
            head_dim
            for head_dim in HEAD_DIMS
            if not backend.why_not(_problem(dtype, head_dim, target, needs_backward))
        ]
        for dtype, short in DTYPE_NAMES.items()
    }
    return {dtype: head_dims for dtype, head_dims in found.items() if head_dims}


def _problem(
    dtype: torch.dtype, head_dim: int, target: str, needs_backward: bool, head_dim_v: int = -1
) -> Problem:
    return Problem(
        batch=1,
        num_heads=2,
        seqlen_q=128,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        target=target,
        needs_backward=needs_backward,
    )


def _ranges(head_dims: list[int]) -> str:
    """ "head_dim 1 to 256", "head_dim 8, 16 to 64", or "any head_dim"."""
    if tuple(head_dims) == HEAD_DIMS:
        return "any head_dim"
    runs: list[list[int]] = []
    for head_dim in head_dims:
        if runs and head_dim == runs[-1][-1] + 1:
            runs[-1].append(head_dim)
        else:
            runs.append([head_dim])
    texts = (f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"head_dim {', '.join(texts)}"


def _reasons(name: str) -> Iterator[str]:
    """Every reason that the table's problems meet, and unequal head_dims, once each."""
    backend = registry.get(name)
    problems = [
        _problem(dtype, head_dim, target, needs_backward)
        for target in TARGETS
        for dtype in DTYPE_NAMES
        for head_dim in (64, HEAD_DIMS[-1])
        for needs_backward in (False, True)
    ]
    problems.append(_problem(torch.bfloat16, 64, "sm_90", False, head_dim_v=32))
    yield from dict.fromkeys(reason for problem in problems for reason in backend.why_not(problem))
