"""Planted faults: the tiled reference with a line changed, each of which a named test must catch.

A suite that passes says nothing until it has been seen to fail. Each mutant is the text of
`reference/tiled.py` and `reference/hbm.py` with an edit applied, so that it stays the reference
but for its one fault; an edit that no longer fits the text is an error. It stands for a defect that
some published kernel had. `flash-rosetta conformance --kill-table` shows which test catches which.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from flash_rosetta import Problem
from flash_rosetta.conformance.nested import run_suite
from flash_rosetta.reference import hbm, tiled

TILES = {"tile_q": 64, "tile_k": 32}
"""Small and unequal, so that small problems cross the boundaries of both."""


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must occur `times` times in the two files together, by `new`."""

    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Test:
    """A test function of the suite; `purpose` limits it to cases with that purpose."""

    __test__ = False

    file: str
    function: str
    purpose: str | None = None

    def __str__(self) -> str:
        return f"{self.function}[{self.purpose}]" if self.purpose else self.function


def forward_on(purpose: str) -> Test:
    return Test("test_forward.py", "test_o_and_lse", purpose)


def backward_on(purpose: str) -> Test:
    return Test("test_backward.py", "test_dq_dk_dv", purpose)


@dataclass(eq=False)
class Mutant:
    """A backend: the tiled reference with `edits`, which `caught_by` must notice.

    `stands_for` names a public defect of the kind, as repository#number.
    """

    name: str
    stands_for: str
    caught_by: Test | None
    edits: Sequence[Edit] = ()

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
        o_and_lse: tuple[Tensor, Tensor] = self._module.forward(q, k, v, problem, **TILES)
        return o_and_lse

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor] = self._module.backward(
            do, dlse, q, k, v, o, lse, problem, **TILES
        )
        return gradients

    @cached_property
    def _module(self) -> ModuleType:
        texts = [inspect.getsource(module) for module in (hbm, tiled)]
        for edit in self.edits:
            found = sum(text.count(edit.old) for text in texts)
            if found != edit.times:
                raise ValueError(
                    f"mutant {self.name}: {edit.old!r} must occur {edit.times} times in the "
                    f"reference, and occurs {found} times"
                )
            texts = [text.replace(edit.old, edit.new) for text in texts]
        mutated_hbm, mutated = ModuleType(f"{self.name}_hbm"), ModuleType(self.name)
        sys.modules[mutated_hbm.__name__] = mutated_hbm  # dataclasses look their module up
        exec(compile(texts[0], f"<{self.name}: hbm.py>", "exec"), mutated_hbm.__dict__)
        exec(compile(texts[1], f"<{self.name}: tiled.py>", "exec"), mutated.__dict__)
        mutated.Hbm = mutated_hbm.Hbm  # type: ignore[attr-defined]
        return mutated


JUDGED = (AssertionError, pytest.fail.Exception)
"""What a check raises, unlike a mutant whose edit does not even run."""

UNBROKEN = Mutant("unbroken", "nothing: it must pass what the mutants fail", None)

MUTANTS = (
    Mutant(
        "no_rescale",
        "Dao-AILab/flash-attention#2082",
        forward_on("edge"),
        [Edit("acc = alpha * acc + gemm(", "acc = acc + gemm(")],
    ),
    Mutant(
        "phantom_keys_past_the_end",
        "FluxML/NNkernels.jl#16",
        forward_on("tail"),
        [Edit("& (j < problem.seqlen_k)", "& (j >= 0)")],
    ),
    Mutant(
        "base_2_lse",
        "lightseekorg/tokenspeed#571",
        forward_on("edge"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()) / 0.6931471805599453")],
    ),
    Mutant(
        "top_left_for_bottom_right",
        "NVIDIA/cutlass#2336",
        forward_on("ragged"),
        [Edit("mask & (j <= i + problem.causal_offset)", "mask & (j <= i)")],
    ),
    Mutant(
        "no_diagonal_in_late_rows",
        "PaddlePaddle/flash-attention#48",
        forward_on("long"),
        [Edit("(j <= i + problem.causal_offset)", "(j <= i - (2 * i > problem.seqlen_q).int())")],
    ),
    Mutant(
        "one_future_key_in_late_rows",
        "keras-team/keras#23038",
        forward_on("long"),
        [Edit("(j <= i + problem.causal_offset)", "(j <= i + (2 * i > problem.seqlen_q).int())")],
    ),
    Mutant(
        "finite_minus_infinity",
        "flashinfer-ai/flashinfer#4267",
        forward_on("huge"),
        [Edit("1), -torch.inf, dtype=dtype)", "1), -5e4, dtype=dtype)")],
    ),
    Mutant(
        "rounded_maximum",
        "pytorch/pytorch#121558",
        forward_on("huge"),
        [Edit("p = (s - m_safe).exp()", "p = (s - m_safe * (1 + 2**-23)).exp()")],
    ),
    Mutant(
        "maximum_before_a_negative_scale",
        "triton-lang/triton tutorial 06",
        forward_on("scale"),
        [
            Edit(
                "torch.maximum(m, s.amax(-1, keepdim=True))",
                "torch.maximum(m, (s.amax if scale >= 0 else s.amin)(-1, keepdim=True))",
            )
        ],
    ),
    Mutant(
        "nan_from_a_row_without_keys",
        "Dao-AILab/flash-attention#443",
        forward_on("masked"),
        [Edit("m_safe = m.where(m != -torch.inf, 0)", "m_safe = m")],
    ),
    Mutant(
        "lse_zero_for_a_row_without_keys",
        "pytorch/pytorch#134650",
        Test("test_properties.py", "test_rows_without_keys"),
        [Edit("lse_tile = m + l.log()", "lse_tile = (m + l.log()).where(sees_a_key, 0)")],
    ),
    Mutant(
        "nan_in_a_key_vanishes",
        "pytorch/pytorch#141128",
        Test("test_properties.py", "test_inf_and_nan_in_a_key_reach_its_rows"),
        [
            Edit(
                "s = s.where(mask, -torch.inf)",
                "s = s.where(mask, -torch.inf)\n" + " " * 16 + "s = s.nan_to_num(-torch.inf)",
            )
        ],
    ),
    Mutant(
        "nan_in_a_value_of_a_masked_tile_leaks",
        "pytorch/pytorch#101967",
        Test("test_properties.py", "test_nan_in_a_value_stays_out_of_earlier_tiles"),
        [Edit("key_end(q_start + tile_q, problem), tile_k)", "problem.seqlen_k, tile_k)")],
    ),
    Mutant(
        "scale_of_the_padded_head_dim",
        "vllm-project/vllm-ascend#1958",
        forward_on("head_dim"),
        [
            Edit(
                "accumulate_dtype(q.dtype), problem.scale",
                "accumulate_dtype(q.dtype), (1 << (q.shape[3] - 1).bit_length()) ** -0.5",
                times=2,
            )
        ],
    ),
    Mutant(
        "kv_head_by_modulo",
        "HazyResearch/HipKittens#22",
        forward_on("group"),
        [
            Edit(
                "x[:, g :: self.group_size]",
                "x[:, (n := x.shape[1] // self.group_size) * g : n * (g + 1)]",
            )
        ],
    ),
    Mutant(
        "accumulator_in_low_precision",
        "philipturner/metal-flash-attention#13",
        forward_on("long"),
        [
            Edit(
                "gemm(p.to(v.dtype), v_tile, problem)",
                "gemm(p.to(v.dtype), v_tile, problem)\n"
                + " " * 16
                + "acc = acc.to(q.dtype).to(dtype)",
            )
        ],
    ),
    Mutant(
        "output_in_another_dtype",
        "tinygrad/tinygrad#5100",
        forward_on("edge"),
        [
            Edit(
                "o = q.new_empty(*q.shape[:3], v.shape[3])",
                "o = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)",
            )
        ],
    ),
    Mutant(
        "ragged_tile_not_written",
        "tile-ai/tilelang#2525",
        forward_on("ragged"),
        [
            Edit(
                'hbm.store("o", q_start, o_tile, g)',
                'q_start + tile_q > problem.seqlen_q or hbm.store("o", q_start, o_tile, g)',
            )
        ],
    ),
    Mutant(
        "input_overwritten",
        "ScalingIntelligence/KernelBench EVAL.md",
        forward_on("edge"),
        [Edit("    return o, lse\n", "    q[..., -1, :] += 1\n    return o, lse\n")],
    ),
    Mutant(
        "result_kept_and_reused",
        "ScalingIntelligence/KernelBench EVAL.md",
        Test("test_properties.py", "test_results_outlive_the_next_call"),
        [
            Edit(
                "o = q.new_empty(*q.shape[:3], v.shape[3])",
                'o = globals().setdefault("kept", q.new_empty(*q.shape[:3], v.shape[3]))',
            )
        ],
    ),
    Mutant(
        "keys_of_an_earlier_call",
        "tile-ai/tilelang#547",
        Test("test_properties.py", "test_calls_do_not_disturb_each_other"),
        [
            Edit(
                "traffic, q=q, k=k, v=v, o=o, lse=lse[..., None])",
                "traffic, q=q, k=globals().setdefault(str(k.shape), k), v=v, o=o, "
                "lse=lse[..., None])",
            )
        ],
    ),
    Mutant(
        "dq_short_in_late_rows",
        "Dao-AILab/flash-attention#2896",
        backward_on("long"),
        [
            Edit(
                'hbm.store("dq", q_start, scale *',
                'hbm.store("dq", q_start, (0.9 if 2 * q_start > problem.seqlen_q else 1) * scale *',
            )
        ],
    ),
    Mutant(
        "p_unmasked_in_the_backward",
        "Dao-AILab/flash-attention#1947",
        backward_on("edge"),
        [Edit("p = p.where(mask, 0)", "pass")],
    ),
    Mutant(
        "ds_unmasked",
        "triton-lang/triton#5660",
        backward_on("edge"),
        [
            Edit("ds = p * (dp - delta_tile)", "ds = (s - lse_tile).exp() * (dp - delta_tile)"),
            Edit("ds = ds.where(mask, 0)", "pass"),
        ],
    ),
    Mutant(
        "stale_dk",
        "tile-ai/tilelang#2668",
        backward_on("edge"),
        [
            Edit(
                "dk_tile = torch.zeros_like(k_tile, dtype=dtype)",
                "dk_tile = dk_tile if k_start else torch.zeros_like(k_tile, dtype=dtype)",
            )
        ],
    ),
    Mutant(
        "do_taken_for_contiguous",
        "pytorch/pytorch#112577",
        backward_on("layout"),
        [Edit("o=o, do=do,", "o=o, do=do.as_strided(do.shape, o.stride()),")],
    ),
    Mutant(
        "dlse_with_the_wrong_sign",
        "Dao-AILab/flash-attention#889",
        Test("test_pytorch.py", "test_gradient_of_one_output"),
        [Edit("delta_tile = delta_tile - dlse_tile", "delta_tile = delta_tile + dlse_tile")],
    ),
    Mutant(
        "different_bits_every_time",
        "Dao-AILab/flash-attention#414",
        Test("test_properties.py", "test_repeats_bit_for_bit"),
        [
            Edit(
                'hbm.store("dv", k_start, dv_tile)',
                'hbm.store("dv", k_start, dv_tile * (1 + 1e-3 * torch.rand_like(dv_tile)))',
            )
        ],
    ),
)


@dataclass(frozen=True)
class Kill:
    """How often the test that must catch a mutant failed on it, and on the unbroken reference."""

    mutant: Mutant
    runs: int
    failures: int
    failures_unbroken: int

    @property
    def is_clean(self) -> bool:
        return self.runs > 0 and self.failures > 0 and self.failures_unbroken == 0


def hunt(mutants: Collection[Mutant] = MUTANTS) -> list[Kill]:
    """Run the collected tests of the suite that must catch `mutants`, in this process."""
    chosen: dict[str, set[Test]] = {m.name: {m.caught_by} for m in mutants if m.caught_by}
    chosen[UNBROKEN.name] = {m.caught_by for m in mutants if m.caught_by}
    outcomes = _Outcomes(chosen)
    files = sorted({test.file for test in chosen[UNBROKEN.name]})
    status, printed = run_suite([*mutants, UNBROKEN], files, "-q", "--tb=no", plugins=[outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"the suite did not run on its mutants:\n{printed}")
    return [
        Kill(
            mutant,
            outcomes.runs[mutant.name, mutant.caught_by],
            outcomes.failures[mutant.name, mutant.caught_by],
            outcomes.not_passed[UNBROKEN.name, mutant.caught_by],
        )
        for mutant in mutants
    ]


class _Outcomes:
    """A pytest plugin: keeps the chosen tests of each backend and counts how they end."""

    def __init__(self, chosen: dict[str, set[Test]]):
        self.chosen = chosen
        self.test_of: dict[str, tuple[str, Test]] = {}
        self.runs: Counter[tuple[str, Test | None]] = Counter()
        self.not_passed: Counter[tuple[str, Test | None]] = Counter()
        self.failures: Counter[tuple[str, Test | None]] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for item in items:
            params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            name = params.get("backend", "")
            purposes = {None, params["case"].purpose} if "case" in params else {None}
            for test in self.chosen.get(name, ()):
                if test.function == item.originalname and test.purpose in purposes:
                    self.test_of[item.nodeid] = (name, test)
        items[:] = [item for item in items if item.nodeid in self.test_of]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = self.test_of[report.nodeid]
        self.runs[key] += report.when == "call"
        self.not_passed[key] += report.failed

    def pytest_exception_interact(self, node: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """A failure is a check that judged; a mutant that merely crashes has not been caught."""
        if call.excinfo is not None and call.excinfo.errisinstance(JUDGED):
            self.failures[self.test_of[node.nodeid]] += 1


def kill_table(kills: Collection[Kill]) -> str:
    """The kills as text: the fault and the defect it stands for, then the test that catches it."""
    lines = ["planted fault: the published defect that it stands for"]
    lines += ["    verdict, cases that fail of cases that run: the test that must catch it"]
    for kill in kills:
        verdict = f"killed, {kill.failures} of {kill.runs}" if kill.is_clean else "SURVIVES"
        if kill.failures_unbroken:
            verdict = f"NO PROOF: the unbroken reference fails {kill.failures_unbroken} as well"
        lines += [f"{kill.mutant.name}: {kill.mutant.stands_for}"]
        lines += [f"    {verdict}: {kill.mutant.caught_by}"]
    return "\n".join(lines)


def main(argv: Sequence[str] = ()) -> int:
    """Print the kill table; the status is 1 when a mutant survives."""
    if argv:
        print(f"--kill-table takes no other arguments; got {' '.join(argv)}", file=sys.stderr)
        return 2
    kills = hunt()
    print(kill_table(kills))
    killed = sum(kill.is_clean for kill in kills)
    print(f"{killed} of {len(kills)} planted faults are caught by the test that must catch them")
    return 0 if killed == len(kills) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
