"""What the compilers make of the kernels, for cards that need not be here.

Slow code is often already visible in what was built: a product that misses the tensor cores,
registers spilled to memory, more shared memory than the card can give a block.
"""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flash_rosetta import KernelReport, Problem, Unsupported
from flash_rosetta.conformance.compiling import compile_kernels, compiler_pool

KIB = 1024


@dataclass(frozen=True)
class Card:
    """What a card's code must show of its tensor cores and its copy engine, as a regular expression
    over PTX, SASS or, where there is no assembler, CUDA C++; and what a block may take."""

    tensor_core: str
    shared_bytes: int
    copy_engine: str = ""


CARDS = {
    "sm_80": Card(r"mma\.sync|HMMA|mma_sync", 163 * KIB),
    "sm_89": Card(r"mma\.sync|HMMA|mma_sync", 99 * KIB),
    "sm_90": Card(
        r"wgmma\.mma_async|HGMMA|wgmma_[sr]s",
        227 * KIB,
        copy_engine=r"cp\.async\.bulk\.tensor|UTMALDG|tma_load",
    ),
    "sm_100": Card(r"tcgen05\.mma|mma\.sync|UTCHMMA|HMMA|mma_sync", 227 * KIB),
}
"""Shared memory per block: CUDA C++ Programming Guide, technical specifications by capability."""

NO_PRODUCT = ("preprocess", "postprocess", "delta")
"""Parts of the names of kernels that multiply no matrices."""

FP16, BF16 = torch.float16, torch.bfloat16


def _problem(target: str, head_dim: int, dtype: torch.dtype, **changes: Any) -> Problem:
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 1000, "needs_backward": True}
    return Problem(target=target, head_dim=head_dim, dtype=dtype, **sizes | changes)


PROBLEMS = [
    _problem("sm_90", 64, BF16, is_causal=True),
    _problem("sm_90", 64, BF16, is_causal=True, seqlen_q=4096),
    _problem("sm_90", 64, FP16),
    _problem("sm_90", 128, BF16, is_causal=True),
    _problem("sm_90", 64, FP16, is_causal=True, seqlen_q=8192),
    _problem("sm_90", 128, BF16, seqlen_q=1024),
    _problem("sm_90", 128, FP16, seqlen_q=8192),
    _problem("sm_90", 128, FP16, num_kv_heads=2),
    _problem("sm_90", 256, BF16, is_causal=True),
    _problem("sm_90", 256, BF16, is_causal=True, seqlen_q=2048),
    _problem("sm_90", 256, FP16),
    _problem("sm_90", 256, BF16, seqlen_q=1024),
    _problem("sm_90", 72, BF16, is_causal=True, causal_alignment="bottom_right"),
    _problem("sm_80", 64, FP16, is_causal=True),
    _problem("sm_80", 128, BF16, is_causal=True),
    _problem("sm_80", 256, FP16),
    _problem("sm_89", 64, BF16),
    _problem("sm_89", 128, FP16, is_causal=True),
    _problem("sm_89", 256, BF16, is_causal=True),
    _problem("sm_100", 64, FP16),
    _problem("sm_100", 128, BF16, is_causal=True),
    _problem("sm_100", 256, BF16),
    _problem("sm_90", 64, BF16, is_causal=True, deterministic=True),
    _problem("sm_90", 64, FP16, deterministic=True),
    _problem("sm_90", 128, BF16, deterministic=True),
    _problem("sm_90", 128, FP16, is_causal=True, deterministic=True),
]
"""Every card with every common head_dim; dtypes and masks take turns. Long problems may have tiles
of their own, deterministic ones kernels of their own."""


QUICK = (
    _problem("sm_90", 128, BF16, is_causal=True),
    _problem("sm_89", 128, FP16, is_causal=True),
)
"""A causal problem on sm_90, and one where shared memory is scarcest."""


@pytest.fixture(scope="module")
def compiled(
    compilable: str, request: pytest.FixtureRequest
) -> Iterator[dict[Problem, Future[list[KernelReport]]]]:
    """What the selected tests will ask for, all compiling side by side."""
    params = [i.callspec.params for i in request.session.items if hasattr(i, "callspec")]
    wanted = [p["problem"] for p in params if p.get("compilable") == compilable]
    with compiler_pool() as pool:
        yield {problem: compile_kernels(pool, compilable, problem) for problem in wanted}


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "problem",
    [pytest.param(p, marks=[] if p in QUICK else pytest.mark.thorough) for p in PROBLEMS],
    ids=lambda p: f"{p.target}-{p.id}",
)
def test_kernels_use_the_card(
    compilable: str, compiled: dict[Problem, Future[list[KernelReport]]], problem: Problem
):
    try:
        reports = compiled[problem].result()
    except Unsupported as refusal:
        pytest.skip(f"refused: {'; '.join(refusal.reasons)}")
    faults = [fault for report in reports for fault in _faults(report, CARDS[problem.target])]
    if sum(_multiplies(report) for report in reports) < 2:
        faults.append(f"  no kernel for each direction: {[report.kernel for report in reports]}")
    if faults:
        what = f"{compilable} compiled {problem.id} for {problem.target}:"
        pytest.fail("\n".join([what, *faults]), pytrace=False)


def _multiplies(report: KernelReport) -> bool:
    return not any(part in report.kernel for part in NO_PRODUCT)


def _faults(report: KernelReport, card: Card) -> list[str]:
    checks: list[tuple[bool, Callable[[], str]]] = [
        (
            _multiplies(report) and not re.search(card.tensor_core, report.assembly),
            lambda: f"uses no tensor core: no {card.tensor_core} in its code",
        ),
        (
            _multiplies(report) and not re.search(card.copy_engine, report.assembly),
            lambda: f"copies by hand: no {card.copy_engine} in its code",
        ),
        (
            # Only SASS can tell: without a bound on its registers a kernel loses them in silence.
            bool(re.search(r"setmaxnreg[\s\S]*\bEXIT\b", report.assembly))
            and "USETMAXREG" not in report.assembly,
            lambda: "moves no registers between warpgroups: its PTX does, its SASS does not",
        ),
        (bool(report.spill_bytes), lambda: f"spills {report.spill_bytes} bytes of registers"),
        (bool(report.warnings), lambda: f"has the assembler warn: {'; '.join(report.warnings)}"),
        (
            report.shared_bytes > card.shared_bytes,
            lambda: f"takes {report.shared_bytes} bytes of shared memory of {card.shared_bytes}",
        ),
    ]
    return [
        f"  {report.kernel} ({report.registers or '?'} registers) {text()}"
        for bad, text in checks
        if bad
    ]


CODE = "cp.async.bulk.tensor.4d wgmma.mma_async.sync"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"assembly": "cp.async.bulk.tensor fma.rn.f32"}, "no tensor core"),
        ({"assembly": "cp.async.bulk.tensor mma.sync"}, "no tensor core"),
        ({"assembly": "wgmma.mma_async cp.async.ca"}, "copies by hand"),
        ({"warnings": ("products are serialized",)}, "are serialized"),
        ({"assembly": f"{CODE} setmaxnreg.dec EXIT ;"}, "moves no registers"),
        ({"spill_bytes": 8}, "spills 8"),
        ({"shared_bytes": 228 * KIB}, "shared memory"),
    ],
)
def test_a_bad_kernel_is_noticed(changes: dict[str, Any], fault: str):
    good = {"spill_bytes": 0, "shared_bytes": 227 * KIB, "assembly": CODE}
    common = {"kernel": "forward", "target": "sm_90", "registers": 128}
    assert not _faults(KernelReport(**common, **good), CARDS["sm_90"])
    (found,) = _faults(KernelReport(**common, **good | changes), CARDS["sm_90"])
    assert fault in found
