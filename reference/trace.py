"""A worked example: FlashAttention-2 on a problem small enough to print, state by state.

Nothing is computed here. The lines come from `tiled.forward` and `tiled.backward` as they run,
through their `observe` argument, so that what is shown is what is tested.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_rosetta.problem import Problem
from flash_rosetta.reference import budget, oracle, tiled


def main(argv: Sequence[str] | None = None) -> int:
    """`flash-rosetta trace`: forward and backward step by step; 0 if they match the oracle."""
    problem, tile, seed = _parse(argv)
    inputs = problem.inputs(seed=seed)
    q, k, v, do, dlse = inputs
    count_q, count_k = -(-problem.seqlen_q // tile), -(-problem.seqlen_k // tile)
    print(
        f"FlashAttention-2, {problem.id}, seed {seed}\n"
        f"tiles of {tile} queries and {tile} keys: {count_q} query tiles, {count_k} key tiles\n"
        f"q, k, v, do {_shape(q)}, scale {problem.scale:.6f}\n"
        f"\n"
        f"Forward: for each query tile, all key tiles it can see. In each row,\n"
        f"  m      maximum of the scores so far\n"
        f"  alpha  exp(m_old - m_new), the correction of what was summed against the old maximum\n"
        f"  l      sum of exp(s - m) so far\n"
        f"  acc    sum of exp(s - m) v so far, divided by l only at the end"
    )
    o, lse = tiled.forward(q, k, v, problem, tile_q=tile, tile_k=tile, observe=_print_forward_step)
    print(
        "\n"
        "Backward: delta = rowsum(do * o) - dlse, then for each key tile, all query tiles that\n"
        "see it. p = exp(s - lse) is computed again. dk and dv of the key tile are summed on\n"
        "chip, dq of the query tile in HBM, from one key tile to the next."
    )
    grads = tiled.backward(
        do, dlse, q, k, v, o, lse, problem, tile_q=tile, tile_k=tile, observe=_print_backward_step
    )
    return _print_comparison(problem, inputs, (o, lse, *grads))


def _print_forward_step(step: str, **now) -> None:
    if step == "start":
        print(
            f"\nquery tile {_rows(now['q_start'], now['q_tile'])}: load q {_shape(now['q_tile'])}; "
            f"m = -inf, l = 0 {_shape(now['m'])}, acc = 0 {_shape(now['acc'])}"
        )
    elif step == "tile":
        print(
            f"  key tile {_rows(now['k_start'], now['k_tile'])}: load k {_shape(now['k_tile'])}, "
            f"v {_shape(now['v_tile'])}\n"
            f"    (1) s = scale q k^T   {_shape(now['s'])}  {_numbers(now['s'])}\n"
            f"    m      {_numbers(now['m_old'])} -> {_numbers(now['m'])}\n"
            f"    alpha  {_numbers(now['alpha'])}\n"
            f"    p = exp(s - m)        {_shape(now['p'])}  {_numbers(now['p'])}\n"
            f"    l      {_numbers(now['l'])}\n"
            f"    acc = alpha acc + p v {_shape(now['acc'])}  row norms {_norms(now['acc'])}"
        )
    else:
        print(
            f"  o = acc / l           {_shape(now['o_tile'])}  row norms {_norms(now['o_tile'])}\n"
            f"  lse = m + log l       {_shape(now['lse_tile'])}  {_numbers(now['lse_tile'])}"
        )


def _print_backward_step(step: str, **now) -> None:
    if step == "start":
        print(
            f"\nkey tile {_rows(now['k_start'], now['k_tile'])}: load k {_shape(now['k_tile'])}, "
            f"v; dk, dv = 0"
        )
    elif step == "tile":
        print(
            f"  query tile {_rows(now['q_start'], now['q_tile'])}: "
            f"(1) s {_shape(now['s'])}, p; "
            f"(2) dv {_shape(now['dv_tile'])} += p^T do; "
            f"(3) dp {_shape(now['dp'])} = do v^T;\n"
            f"    ds = p (dp - delta) {_numbers(now['ds'])}\n"
            f"    (4) dq {_shape(now['dq_tile'])} += ds k, row norms {_norms(now['dq_tile'])}; "
            f"(5) dk {_shape(now['dk_tile'])} += ds^T q"
        )
    else:
        print(
            f"  store dk = scale dk, row norms {_norms(now['dk_tile'])}, "
            f"and dv, {_norms(now['dv_tile'])}"
        )


def _print_comparison(problem: Problem, inputs, outputs: Sequence[Tensor]) -> int:
    q, k, v, do, dlse = (x.double() for x in inputs)
    o, lse = oracle.forward(q, k, v, problem)
    wanted = (o, lse, *oracle.backward(do, dlse, q, k, v, problem))
    floors = budget.rounding_floor(problem, inputs, o)
    print("\nAgainst the oracle (the whole score matrix, fp64), by the budgets of the suite:")
    passed = True
    for name, got, want in zip(("o", "lse", "dq", "dk", "dv"), outputs, wanted, strict=True):
        verdict = budget.compare(name, got, want, budget.budget_of(problem), floors.get(name))
        largest = (got.double() - want).abs().max()
        judgement = "ok" if verdict.passed else f"WRONG, {verdict}"
        print(f"  {name:3} {_shape(got):9} largest difference {largest:.1e}  {judgement}")
        passed &= verdict.passed
    return 0 if passed else 1


def _parse(argv: Sequence[str] | None) -> tuple[Problem, int, int]:
    parser = argparse.ArgumentParser(
        prog="flash-rosetta trace",
        description="FlashAttention-2 on a small fp32 problem, printed step by step: running "
        "maximum m, sum l, correction factor alpha and shapes, then the backward's five products, "
        "then a comparison with the oracle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seqlen", type=int, default=8, help="queries, and as many keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tile", type=int, default=2, help="queries, and keys, per tile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args(argv)
    for name in ("seqlen", "head_dim", "tile"):
        if getattr(options, name) < 1:
            option = "--" + name.replace("_", "-")
            parser.error(f"{option} must be at least 1, got {getattr(options, name)}")
    problem = Problem(
        batch=1,
        num_heads=1,
        seqlen_q=options.seqlen,
        head_dim=options.head_dim,
        dtype=torch.float32,
        is_causal=options.causal,
        needs_backward=True,
    )
    return problem, options.tile, options.seed


def _rows(start: int, tile: Tensor) -> str:
    size = tile.shape[-2]
    return f"{start // size} (rows {start} to {start + size - 1})"


def _shape(x: Tensor) -> str:
    """Without batch and heads, which are 1."""
    return str(list(x.shape[2:])).replace(", ", " x ")


def _numbers(x: Tensor) -> str:
    """[a b] for a column of one number per row, [a b; c d] for a matrix."""
    x = x[0, 0]
    if x.shape[-1] == 1:
        x = x.mT
    return "[" + "; ".join(" ".join(f"{value:.4f}" for value in row) for row in x.tolist()) + "]"


def _norms(x: Tensor) -> str:
    return _numbers(x.double().norm(dim=-1, keepdim=True))
