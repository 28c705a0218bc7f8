"""Laws of attention, tried on problems that hypothesis draws; a failure is shrunk to the smallest.

No oracle judges here: each law relates results of one backend to one another.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from flash_rosetta import Inputs, Problem
from flash_rosetta.conformance import checks
from flash_rosetta.conformance.cases import LAYOUTS, Lane
from flash_rosetta.conformance.strategies import for_every

pytestmark = pytest.mark.thorough  # drawn problems have kernels of their own to compile

FULL = {"is_causal": False}
TOP_LEFT = {"is_causal": True, "causal_alignment": "top_left"}


def dense(problem: Problem, device: torch.device) -> Inputs:
    return LAYOUTS["dense"](problem.inputs(device))


def test_permuting_keys_changes_nothing(backend: str, lane: Lane, device: torch.device):
    def law(problem: Problem, data: st.DataObject) -> None:
        order = torch.tensor(data.draw(st.permutations(range(problem.seqlen_k))), device=device)
        x = dense(problem, device)
        got = checks.run(backend, x, problem)
        permuted = checks.run(backend, x._replace(k=x.k[:, :, order], v=x.v[:, :, order]), problem)
        for name in ("o", "lse"):
            checks.agree(problem, name, permuted[name], got[name])

    for_every(backend, lane, device, law, **FULL)


def test_shifting_scores_shifts_lse_alone(backend: str, lane: Lane, device: torch.device):
    """One vector added to every key adds its product with a query to all scores of a row."""

    def law(problem: Problem, data: st.DataObject) -> None:
        x = dense(problem, device)
        shift = torch.linspace(-1, 1, problem.head_dim, device=device)
        got = checks.run(backend, x, problem)
        shifted = checks.run(backend, x._replace(k=x.k + shift), problem)
        checks.agree(problem, "o", shifted.o, got.o)
        checks.agree(problem, "lse", shifted.lse, got.lse + problem.scale * (x.q @ shift))

    for_every(backend, lane, device, law, dtype=torch.float32)


def test_o_is_linear_in_v(backend: str, lane: Lane, device: torch.device):
    """o of a v1 + b v2 is a o1 + b o2; a and b are powers of two, so that v rounds nothing."""

    def law(problem: Problem, data: st.DataObject) -> None:
        a, b = data.draw(st.sampled_from([(2.0, 0.0), (-0.5, 1.0), (1.0, 4.0)]))
        x = dense(problem, device)
        other = x.v.flip(2)
        combined = (a * x.v.float() + b * other.float()).to(problem.dtype)
        o, o_other, o_combined = (
            checks.run(backend, x._replace(v=v.contiguous()), problem).o.double()
            for v in (x.v, other, combined)
        )
        checks.agree(problem, "o", o_combined, a * o + b * o_other, times=4)

    for_every(backend, lane, device, law)


def test_later_keys_do_not_matter(backend: str, lane: Lane, device: torch.device):
    """Rows that do not see a key keep every bit when it changes, and the row that does notices."""

    def law(problem: Problem, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, problem.seqlen_k - 1), label="key")
        x = dense(problem, device)
        before = checks.run(backend, x, problem)
        changed = x._replace(k=x.k.clone(), v=x.v.clone())
        changed.k[:, :, key:] = 3
        changed.v[:, :, key:] = -7
        after = checks.run(backend, changed, problem)
        unaware = min(max(0, key - problem.causal_offset), problem.seqlen_q)
        assert torch.equal(before.o[:, :, :unaware], after.o[:, :, :unaware]), problem.id
        assert torch.equal(before.lse[:, :, :unaware], after.lse[:, :, :unaware]), problem.id
        if unaware < problem.seqlen_q:
            assert not torch.equal(before.o[:, :, unaware], after.o[:, :, unaware]), problem.id

    for_every(backend, lane, device, law, **TOP_LEFT)


def test_groups_equal_heads_repeated(backend: str, lane: Lane, device: torch.device):
    """Bit for bit: a query head cannot tell whether its key/value head is shared."""

    def law(problem: Problem, data: st.DataObject) -> None:
        x = dense(problem, device)
        alone = {n: getattr(x, n).repeat_interleave(problem.group_size, dim=1) for n in "kv"}
        got = checks.run(backend, x, problem)
        repeated = replace(problem, num_kv_heads=problem.num_heads)
        want = checks.run(backend, x._replace(**alone), repeated)
        for name in ("o", "lse"):
            checks.agree(problem, name, got[name], want[name])

    for_every(backend, lane, device, law)


def test_parts_merged_by_lse_equal_the_whole(backend: str, lane: Lane, device: torch.device):
    """Attention to some keys and to the others, weighted by exp(lse): what ring attention does."""

    def law(problem: Problem, data: st.DataObject) -> None:
        assume(problem.seqlen_k > 1)
        split = data.draw(st.integers(1, problem.seqlen_k - 1), label="split")
        x = dense(problem, device)
        whole = checks.run(backend, x, problem)
        parts = [
            checks.run(
                backend,
                x._replace(k=x.k[:, :, keys], v=x.v[:, :, keys]),
                replace(problem, seqlen_k=len(range(problem.seqlen_k)[keys])),
            )
            for keys in (slice(split), slice(split, None))
        ]
        lse = torch.logaddexp(*(part.lse.double() for part in parts))
        o = sum((part.lse.double() - lse).exp()[..., None] * part.o.double() for part in parts)
        checks.agree(problem, "lse", whole.lse, lse)
        checks.agree(problem, "o", whole.o, o)

    for_every(backend, lane, device, law, **FULL)


def test_the_gradient_of_a_sum_in_v_counts_rows(backend: str, lane: Lane, device: torch.device):
    """P sums to 1 along a row, so dv of o.sum() adds up to the rows that see a key."""

    def law(problem: Problem, data: st.DataObject) -> None:
        x = dense(problem, device)
        ones = x._replace(do=torch.ones_like(x.do))
        dv = checks.run(backend, ones, problem, gradients=("dv",), through="o")["dv"].double()
        columns = dv.sum(2)
        blind = max(0, -problem.causal_offset) if problem.is_causal else 0
        rows = problem.group_size * (problem.seqlen_q - min(blind, problem.seqlen_q))
        checks.agree(problem, "dv", columns, torch.full_like(columns, rows))

    for_every(backend, lane, device, law)
