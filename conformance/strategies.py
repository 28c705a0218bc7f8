"""Problems that hypothesis draws: any lengths, masks, groups and batches of a lane's usual kernels.

Only sizes that cost no compilation vary, so that a GPU can try many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flash_rosetta import Problem, registry
from flash_rosetta.conformance.cases import MASKS, Lane
from flash_rosetta.problem import target_of


def lengths(lane: Lane) -> st.SearchStrategy[int]:
    """1 to two tiles and a bit, with a bias to the boundaries of tiles."""
    edges = [n for sizes in lane.edges.values() for n in sizes]
    return st.one_of(st.integers(1, 2 * lane.largest_tile + 3), st.sampled_from(edges))


@st.composite
def problems(draw: st.DrawFn, lane: Lane, **fixed: Any) -> Problem:
    """A problem of the lane; `fixed` are fields that are not drawn."""
    num_kv_heads = draw(st.integers(1, 2), label="num_kv_heads")
    sizes: dict[str, Any] = {
        "batch": draw(st.integers(1, 2), label="batch"),
        "num_heads": num_kv_heads * draw(st.integers(1, 3), label="group_size"),
        "num_kv_heads": num_kv_heads,
        **draw(st.sampled_from(MASKS), label="mask"),
    }
    seqlen_q, seqlen_k = draw(lengths(lane), "seqlen_q"), draw(lengths(lane), "seqlen_k")
    return lane.problem(seqlen_q, seqlen_k, **sizes | fixed)


def for_every(
    backend: str,
    lane: Lane,
    device: torch.device,
    law: Callable[[Problem, st.DataObject], None],
    **fixed: Any,
) -> None:
    """Try `law` on problems of the lane, the same ones every time; a failure shows the smallest.

    Problems that the backend refuses are passed over; skips the test if it refuses them all.
    """
    refusals: list[str] = []
    tried: list[Problem] = []

    @settings(
        max_examples=lane.examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problem=problems(lane, **fixed), data=st.data())
    def try_law(problem: Problem, data: st.DataObject) -> None:
        posed = replace(problem, target=target_of(device), needs_backward=True)
        if reasons := registry.why_not(backend, posed):
            refusals[:] = reasons
            return
        tried.append(problem)
        law(problem, data)

    try_law()
    if not tried:
        pytest.skip(f"refused: {'; '.join(refusals)}")
