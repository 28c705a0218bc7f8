"""Whether an output is right, by the oracle and the budgets that the conformance suite uses."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_rosetta.bench.contenders import OUTPUT_NAMES, Outputs
from flash_rosetta.problem import Direction, Inputs, Problem
from flash_rosetta.reference import budget, oracle

SLICES = 3
"""(batch, key/value head) pairs that are judged: the first, the last, and a seeded one between."""


@dataclass(frozen=True)
class Judgement:
    """`faults` says what is wrong, empty if nothing is; `errors` goes into the record.

    max_error is the largest absolute error of o, or of dq, dk and dv; rel_error and row_error are
    the tensor and row errors of `flash_rosetta.reference.budget`; lse_error is absolute.
    """

    faults: list[str]
    errors: dict[str, float]


class Judge:
    """Holds the oracle's answer, in fp64, on whole (batch, head) slices of one problem.

    An fp64 oracle over a full card's worth of heads would take longer than the race, so a few
    slices are judged element by element, the last one among them (where a wrong offset shows), and
    the rest must be finite. A slice is one key/value head with all its query heads: o and all three
    gradients of it depend on nothing else. Every contender is held against the same answer.
    """

    def __init__(self, direction: Direction, inputs: Inputs, problem: Problem, seed: int = 0):
        self.direction = direction
        self.problem = problem
        pairs = [(b, h) for b in range(problem.batch) for h in range(problem.num_kv_heads)]
        middle = pairs[1:-1]
        chosen = random.Random(seed).sample(middle, min(SLICES - 2, len(middle)))
        self.slices = [pairs[0], *chosen, *pairs[1:][-1:]]
        sampled = replace(
            problem, batch=len(self.slices), num_heads=problem.group_size, num_kv_heads=1
        )
        q, k, v, do, dlse = (self._sample(t) for t in inputs)
        wide = Inputs(*(t.double() for t in (q, k, v, do, dlse)))
        self._want = _oracle(direction, wide, sampled)
        twin = _oracle(direction, Inputs(q, k, v, do, dlse), sampled)
        # Peaked inputs cancel: real ones may need twice what plain PyTorch loses at this precision.
        usual = budget.budget_of(problem)
        self._budgets = [
            budget.twin_budget(name, usual, t, want)
            for name, t, want in zip(OUTPUT_NAMES[direction], twin, self._want, strict=True)
        ]
        self._floors: dict[str, Tensor] = {}
        if direction == "backward":
            o, _ = oracle.forward(wide.q, wide.k, wide.v, sampled)
            self._floors = budget.rounding_floor(sampled, wide, o)

    def __call__(self, outputs: Outputs) -> Judgement:
        """Judge what a contender returned: (o,), (o, lse) or (dq, dk, dv)."""
        faults: list[str] = []
        errors = dict.fromkeys(("max_error", "rel_error", "row_error"), 0.0)
        for name, got, want, allowed in zip(
            OUTPUT_NAMES[self.direction], outputs, self._want, self._budgets, strict=False
        ):
            if tuple(got.shape[:2]) not in self._heads():
                faults.append(f"{name}: shape {tuple(got.shape)} has other batch or heads")
                continue
            sample = self._sample(got)
            verdict = budget.compare(name, sample, want, allowed, self._floors.get(name))
            if not verdict.passed:
                faults.append(str(verdict))
            elif not got.isfinite().all():
                faults.append(f"{name}: {int((~got.isfinite()).sum())} elements are not finite")
            if verdict.metric in ("shape", "non-finite"):
                continue
            worst = float((sample.double() - want).abs().max())
            if name == "lse":
                errors["lse_error"] = worst
            else:
                tensor_error, row_error = budget.relative_errors(
                    sample, want, self._floors.get(name)
                )
                errors["max_error"] = max(errors["max_error"], worst)
                errors["rel_error"] = max(errors["rel_error"], tensor_error)
                errors["row_error"] = max(errors["row_error"], float(row_error.max()))
        return Judgement(faults, {name: float(f"{error:.4g}") for name, error in errors.items()})

    def _heads(self) -> set[tuple[int, int]]:
        problem = self.problem
        return {(problem.batch, problem.num_heads), (problem.batch, problem.num_kv_heads)}

    def _sample(self, x: Tensor) -> Tensor:
        """The judged slices of a tensor [batch, heads, ...], stacked along batch."""
        heads = x.shape[1] // self.problem.num_kv_heads
        return torch.cat([x[b : b + 1, h * heads : (h + 1) * heads] for b, h in self.slices])


def _oracle(direction: Direction, inputs: Inputs, problem: Problem) -> Outputs:
    q, k, v, do, _ = inputs
    if direction == "forward":
        return oracle.forward(q, k, v, problem)
    return oracle.backward(do, None, q, k, v, problem)
