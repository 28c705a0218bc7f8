"""What one call costs the host, Python to launch, on a problem too small to hide it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch

from flash_rosetta.bench.contenders import Contender
from flash_rosetta.problem import Problem, target_of

CALLS = 200
QUEUE = 10
"""Calls between two synchronisations: a full launch queue would block the host."""


def host_times(contender: Contender, device: torch.device) -> dict[str, float | None]:
    """Microseconds of one public call without and with gradients wanted; None where there is none.

    Batch 1, 4 heads, 128 tokens, head_dim 64, bf16. A CPU has no launch to time.
    """
    times: dict[str, float | None] = {"host_us": None, "host_grad_us": None}
    if device.type != "cuda":
        return times
    for key, needs_backward in (("host_us", False), ("host_grad_us", True)):
        problem = Problem(
            batch=1,
            num_heads=4,
            seqlen_q=128,
            head_dim=64,
            target=target_of(device),
            needs_backward=needs_backward,
        )
        if contender.why_not(problem):
            continue
        q, k, v = (t.requires_grad_(needs_backward) for t in problem.inputs(device)[:3])

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return contender.call(q, k, v)

        with contender.chosen():
            times[key] = round(_median_seconds(call, device) * 1e6, 1)
    return times


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    for _ in range(QUEUE):
        call()
    seconds = []
    for i in range(CALLS):
        if i % QUEUE == 0:
            torch.cuda.synchronize(device)
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    torch.cuda.synchronize(device)
    return statistics.median(seconds)
