"""A backend in a package of its own, to copy: three methods, what it can do, what it cannot yet.

It stores the scores, as FlashAttention must not, and has one fault that its author knows of.
"""

import torch

CAPABILITIES = {"fp16", "bf16", "fp32", "tf32", "full", "causal_top_left", "odd_head_dim"}
CAPABILITIES |= {"head_dim_above_128", "negative_scale", "backward", "deterministic"}

ADDED = "the mask is added to the scores, where NaN + -inf is NaN"
MULTIPLIED = "masked keys are multiplied like any other, and 0 * NaN is NaN"
EXPECTED_FAILURES = {
    "test_inf_and_nan_in_a_key_reach_its_rows[nan-causal]": ADDED,
    "test_inf_and_nan_in_a_key_reach_its_rows[inf-causal]": ADDED,
    "test_inf_and_nan_in_a_key_reach_its_rows[-inf-causal]": ADDED,
    "test_nan_in_keys_that_no_row_sees": MULTIPLIED,
    "test_nan_in_a_value_stays_out_of_earlier_tiles": MULTIPLIED,
}


class Toy:
    name = "toy"

    capabilities = frozenset(CAPABILITIES)
    expected_failures = EXPECTED_FAILURES

    def why_not(self, problem):
        refused = {
            "dtype torch.float64": problem.dtype == torch.float64,
            "num_kv_heads unlike num_heads": problem.num_kv_heads != problem.num_heads,
            "head_dim_v unlike head_dim": problem.head_dim_v != problem.head_dim,
            "causal_alignment bottom_right": problem.is_causal
            and problem.causal_alignment == "bottom_right",
        }
        return [f"{what} is not implemented" for what, is_asked in refused.items() if is_asked]

    def forward(self, q, k, v, problem):
        s = self._scores(q, k, problem)
        m = s.amax(-1, keepdim=True)
        p = (s - m).exp()
        l = p.sum(-1, keepdim=True)
        return (p @ v.float() / l).to(q.dtype), (m + l.log()).squeeze(-1)

    def backward(self, do, dlse, q, k, v, o, lse, problem):
        p = (self._scores(q, k, problem) - lse[..., None]).exp()
        q, k, v, o, do = (t.float() for t in (q, k, v, o, do))
        delta = (do * o).sum(-1) - (0 if dlse is None else dlse)
        ds = problem.scale * p * (do @ v.mT - delta[..., None])
        return tuple(t.to(problem.dtype) for t in (ds @ k, ds.mT @ q, p.mT @ do))

    def _scores(self, q, k, problem):
        s = problem.scale * (q.float() @ k.float().mT)
        if problem.is_causal:
            s = s + torch.full(s.shape[-2:], -torch.inf, device=s.device).triu(1)
        return s


backend = Toy()
