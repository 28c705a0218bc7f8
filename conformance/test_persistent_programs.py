"""How the persistent programs of Hopper's forward share the query tiles and a multiprocessor.

Nothing here compiles or runs a kernel. What could go wrong is never a wrong number: it is slow, or
hangs.
"""

import sys
from types import ModuleType

import pytest

from flash_rosetta import Problem, registry
from flash_rosetta.turns import num_programs

NEEDS = {"tilelang": "tilelang", "cute": "cutlass.cute"}
"""The backends that have such programs, and what must be installed for them."""

MOST = 132
"""Programs that an H200 runs at once, one on each multiprocessor."""


@pytest.fixture(scope="module", params=NEEDS)
def modules(request: pytest.FixtureRequest) -> dict[str, ModuleType]:
    """Some files of a backend's folder, by name."""
    pytest.importorskip(NEEDS[request.param], exc_type=ImportError)
    folder = type(registry.get(request.param)).__module__.rpartition(".")[0]
    return {name: sys.modules[f"{folder}.{name}"] for name in ("forward", "tiles")}


def work_of(problem: Problem, tile_q: int, tile_k: int, programs: int) -> list[int]:
    """What each program has to do, in key tiles; what a query tile costs beside them counts as one.

    Programs take turns over the tiles of one head after the other, the last tile of each first, and
    every other round goes backwards.
    """
    work = [0] * programs
    starts = [*range(0, problem.seqlen_q, tile_q)][::-1] * (problem.num_heads * problem.batch)
    for n, start in enumerate(starts):
        keys = problem.seqlen_k
        if problem.is_causal:
            keys = min(max(start + tile_q + problem.causal_offset, 0), keys)
        turn = n % programs
        program = turn if n // programs % 2 == 0 else programs - 1 - turn
        work[program] += 1 + -(-keys // tile_k)
    return work


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 1, "num_heads": 1, "seqlen_q": 1},
        {"is_causal": True},
        {"is_causal": True, "batch": 1, "num_heads": 4},
        {"is_causal": True, "seqlen_q": 16384, "batch": 1},
        {"is_causal": True, "seqlen_q": 2500, "seqlen_k": 5000},
        {"is_causal": True, "seqlen_q": 5000, "seqlen_k": 300},
        {"is_causal": True, "seqlen_q": 5000, "seqlen_k": 3000, "causal_alignment": "bottom_right"},
    ],
    ids=str,
)
def test_no_program_has_more_to_do_than_if_all_took_part(changes):
    sizes = {"batch": 2, "num_heads": 16, "seqlen_q": 4096, "head_dim": 128}
    problem = Problem(**sizes | changes)
    programs = num_programs(problem, 128, 96, MOST)
    num_tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // 128)
    all_taking_part = min(num_tiles, MOST)
    assert 0 < programs <= all_taking_part
    if not problem.is_causal:
        assert programs == all_taking_part
    most = {n: max(work_of(problem, 128, 96, n)) for n in (programs, all_taking_part)}
    assert most[programs] <= most[all_taking_part]


def test_programs_of_a_causal_problem_have_equal_work():
    """Of 132 programs in turns over 128 tiles a head, one would have 1.5 times the mean."""
    problem = Problem(batch=1, num_heads=16, seqlen_q=16384, head_dim=128, is_causal=True)
    assert num_programs(problem, 128, 128, MOST) == 128
    assert len({*work_of(problem, 128, 128, 128)}) == 1
    uneven = work_of(problem, 128, 128, MOST)
    assert max(uneven) > 1.4 * sum(uneven) / MOST


def test_warpgroups_ask_for_no_more_registers_than_their_program_has(modules):
    """All threads start with the same number, in eights; a warpgroup that asks for more waits."""
    tiles, producer = modules["tiles"], modules["forward"].PRODUCER_REGISTERS
    for tile in (each.forward for each in (*tiles.HOPPER.values(), *tiles.LONG.values())):
        threads = 128 * (tile.warpgroups + 1)
        at_the_start = min(65536 // (threads * tile.programs), 255) // 8 * 8 * threads
        assert 128 * (producer + tile.warpgroups * tile.registers) <= at_the_start, tile
        assert tile.registers % 8 == 0
        assert tile.registers <= 255
