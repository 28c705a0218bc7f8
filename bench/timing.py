"""Time several functions against each other: interleaved rounds, cold L2, device time on a GPU."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Protocol

import torch

Run = Callable[[], object]

WARMUP_ROUNDS = 3
LEAST_FLUSH = 2.5e-4
"""Seconds: longer than Python takes to launch an attention call, which then never waits idle."""

MOST_FLUSH = 1e-3
"""Seconds: what a backend of many launches needs beyond this is its own time, and is measured."""

TRIES = 3
"""How often a round is run at most, if the device comes to the call before the host is through."""


class Stopwatch(Protocol):
    """Times runs on one device; `seconds` come in the order of the rounds."""

    def time(self, runs: Mapping[str, Run], rounds: Mapping[str, int]) -> dict[str, list[float]]:
        """Seconds of each run's rounds, the runs interleaved."""
        ...

    def launch_seconds(self, run: Run) -> float:
        """How long the host is busy with one call; on a CPU that is the call itself."""
        ...

    def hide(self, launch_seconds: Mapping[str, float]) -> None:
        """From now on keep the device busy before each round for longer than any launch takes."""
        ...

    def peak_bytes(self, run: Run) -> int | None:
        """Device memory at its highest during one call, less what was allocated before it."""
        ...


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()


def race(
    runs: Mapping[str, Run],
    watch: Stopwatch,
    *,
    budget: float,
    rounds: int | None = None,
    least: int = 10,
    most: int = 100,
) -> dict[str, list[float]]:
    """Seconds per round of each run, after a warm-up and interleaved round by round.

    A run gets the rounds that fit into `budget` seconds, between `least` and `most` of them, or
    `rounds` of them. One that needs eight times its budget for `least` rounds gets three.
    """
    watch.hide({name: watch.launch_seconds(run) for name, run in runs.items()})
    warm = watch.time(runs, dict.fromkeys(runs, WARMUP_ROUNDS))

    def fitting(seconds: float) -> int:
        if rounds is not None:
            return rounds
        if least * seconds > 8 * budget:
            return 3
        return min(most, max(least, int(budget / max(seconds, 1e-7))))

    return watch.time(runs, {name: fitting(min(warm[name])) for name in runs})


def interleave(rounds: Mapping[str, int]) -> Iterator[str]:
    """Whose turn it is: each name as often as it has rounds, spread evenly, in a rotating order.

    What drifts during a race (clocks, temperature) then touches every name alike, and none runs
    always behind the same neighbour.
    """
    names = list(rounds)
    laps = max(rounds.values())
    for lap in range(laps):
        first = lap % len(names)
        for name in names[first:] + names[:first]:
            if (lap + 1) * rounds[name] // laps > lap * rounds[name] // laps:
                yield name


class CpuStopwatch:
    """Wall-clock time of each call."""

    def time(self, runs: Mapping[str, Run], rounds: Mapping[str, int]) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for name in interleave(rounds):
            start = perf_counter()
            runs[name]()
            seconds[name].append(perf_counter() - start)
        return seconds

    def launch_seconds(self, run: Run) -> float:
        return 0.0

    def hide(self, launch_seconds: Mapping[str, float]) -> None:
        pass

    def peak_bytes(self, run: Run) -> int | None:
        return None


class CudaStopwatch:
    """Device time between two CUDA events around each call, the L2 cache flushed before it.

    The flush writes a buffer of four times the L2, as often as it takes to keep the device busy
    while the host launches the call: so the host's work stays out of the measured time, as it
    does in a model whose queue is full. A host that was late all the same, because something else
    kept it, is seen: that round is run again.
    """

    def __init__(self, device: torch.device):
        self.device = device
        properties = torch.cuda.get_device_properties(device)
        self.buffer = torch.empty(
            max(4 * properties.L2_cache_size, 64 << 20), dtype=torch.uint8, device=device
        )
        self.passes = 1
        self.of_many_launches: set[str] = set()
        passes = {"flush": self.buffer.zero_}
        self.time(passes, {"flush": WARMUP_ROUNDS})
        self.seconds_per_pass = statistics.median(self.time(passes, {"flush": 20})["flush"])
        self.hide({})

    def hide(self, launch_seconds: Mapping[str, float]) -> None:
        longest = max(launch_seconds.values(), default=0.0)
        wanted = min(max(LEAST_FLUSH, 2 * longest), MOST_FLUSH)
        self.passes = math.ceil(wanted / self.seconds_per_pass)
        self.of_many_launches = {name for name, s in launch_seconds.items() if s > MOST_FLUSH}

    def time(self, runs: Mapping[str, Run], rounds: Mapping[str, int]) -> dict[str, list[float]]:
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]
        events = {name: [] for name in runs}
        collects = gc.isenabled()
        gc.disable()  # a pause of the host's would show as an idle device
        try:
            for name in interleave(rounds):
                events[name].append(self._round(runs[name], name in self.of_many_launches))
            torch.cuda.synchronize(self.device)
        finally:
            if collects:
                gc.enable()
        return {
            name: [start.elapsed_time(end) * 1e-3 for start, end in pairs]
            for name, pairs in events.items()
        }

    def _round(
        self, run: Run, has_many_launches: bool
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """The events around a call; each further try flushes for twice as long."""
        for i in range(1 if has_many_launches else TRIES):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(self.passes << i):
                self.buffer.zero_()
            start.record()
            run()
            end.record()
            if not start.query():
                break
        return start, end

    def launch_seconds(self, run: Run) -> float:
        return min(self._launch(run) for _ in range(WARMUP_ROUNDS))

    def _launch(self, run: Run) -> float:
        torch.cuda.synchronize(self.device)
        start = perf_counter()
        run()
        return perf_counter() - start

    def peak_bytes(self, run: Run) -> int | None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def matmul_tflops(watch: Stopwatch, device: torch.device, size: int = 8192) -> float:
    """The rate of a square bf16 matmul on random data: what this card's tensor cores sustain.

    Random, because a matmul of zeros draws less power and runs at higher clocks.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    seconds = race({"matmul": lambda: a @ b}, watch, budget=0.25)["matmul"]
    return 2 * size**3 / statistics.median(seconds) / 1e12


class ReplayClock:
    """A timer for pytest-benchmark that reports rounds which were measured before.

    pytest-benchmark runs one test to its end before the next, and so cannot interleave; the race
    measures first, then each contender's test replays its own rounds: `load` them, and every two
    readings of the clock, at a round's start and end, differ by one loaded duration exactly.
    """

    __name__ = "flash_rosetta.bench.timing.replay"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, seconds: list[float]) -> None:
        self._readings = (reading for s in seconds for reading in (0.0, s))

    def __call__(self) -> float:
        return next(self._readings)


REPLAY = ReplayClock()
