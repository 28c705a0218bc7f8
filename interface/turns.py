"""How persistent programs share the query tiles of a problem: in turns.

Round after round each program takes the tile at its place, the last tile of each head first, one
head after the other; every other round goes backwards.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from flash_rosetta.problem import Problem


def num_programs(problem: Problem, tile_q: int, tile_k: int, most: int) -> int:
    """How many programs share the query tiles in turns, `most` at most.

    In a causal problem a program's tiles differ in length. Where `most` and a head's number of
    tiles have little in common, turns even that out; but of 132 programs in turns over 128 tiles a
    head the busiest has 1.5 times the mean, and of 128 programs no more than the mean. So that
    number of the last sixteenth up to `most` is taken whose busiest program has the least to do.
    """
    num_tiles = -(-problem.seqlen_q // tile_q)
    total = num_tiles * problem.num_heads * problem.batch
    if not problem.is_causal or total <= most:
        return min(total, most)
    last_row = np.arange(num_tiles, 0, -1) * tile_q + problem.causal_offset
    key_tiles = -(-np.clip(last_row, 0, problem.seqlen_k) // tile_k)
    index = np.arange(min(total, 64 * most))  # turns repeat themselves: no need to count them all
    work = (1 + key_tiles)[index % num_tiles]  # one for what each tile costs beside its keys

    def most_work(programs: int) -> int:
        turn = index % programs
        program = np.where(index // programs % 2 == 0, turn, programs - 1 - turn)
        return int(np.bincount(program, work).max())

    return min(range(most, most - most // 16 - 1, -1), key=most_work)


@lru_cache
def multiprocessors(device: int | None) -> int:
    """How many a device has; where there is none, to compile alone, as many as an H200."""
    if device is None:
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
