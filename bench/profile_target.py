"""What Nsight Compute looks at: one backend's forward and backward, once, when all is warm.

ncu --profile-from-start off python -m flash_rosetta.bench.profile_target triton
"""

from __future__ import annotations

import sys

import torch

from flash_rosetta import registry
from flash_rosetta.problem import Problem, target_of

HEAD_DIM, SEQLEN, BATCH, NUM_HEADS = 128, 4096, 4, 16


def problem_on(device: torch.device) -> Problem:
    """Head_dim 128, 16k tokens, not causal, bf16."""
    return Problem(
        batch=BATCH,
        num_heads=NUM_HEADS,
        seqlen_q=SEQLEN,
        head_dim=HEAD_DIM,
        target=target_of(device),
        needs_backward=True,
    )


def main(name: str) -> None:
    """Run the backend twice, the second time for the profiler."""
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_on(device)
    q, k, v, do, _ = problem.inputs(device)
    backend = registry.resolve(name, problem)

    def both() -> None:
        torch.cuda.nvtx.range_push("forward")
        o, lse = backend.forward(q, k, v, problem)
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_push("backward")
        backend.backward(do, None, q, k, v, o, lse, problem)
        torch.cuda.nvtx.range_pop()

    both()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    both()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
