"""The race as a pytest plugin: makes the tests, runs each heat once, and completes the JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from flash_rosetta import machine
from flash_rosetta.bench import report, timing
from flash_rosetta.bench.contenders import (
    Contender,
    SdpaContender,
    contenders,
    longest_kernel,
    sdpa_family,
)
from flash_rosetta.bench.heat import Outcome, run_heat, significant
from flash_rosetta.bench.host import host_times
from flash_rosetta.bench.parts import Lab
from flash_rosetta.bench.warm import Job, compile_all
from flash_rosetta.bench.workloads import Timed, Workload, workloads

CPU_ROUNDS = 2
"""On a CPU only the answer counts; two, so that the quartiles of pytest-benchmark exist."""


WIDTH = 176
"""Columns that the tables need; a narrower terminal wraps their lines."""

NO_NUMBER_KEYS = ("backend", "direction", "workload", "problem", "verdict", "reasons")
"""What the JSON keeps of a contender without a number."""


@dataclass(frozen=True)
class RaceOptions:
    """What to race. Empty selections take everything; `budget` is seconds for one contender."""

    workload: str = "captured"
    backends: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    directions: tuple[Timed, ...] = ("forward", "backward")
    head_dims: tuple[int, ...] = ()
    seqlens: tuple[int, ...] = ()
    rounds: int | None = None
    budget: float = 0.25


@dataclass(frozen=True)
class Entrant:
    """One contender in one heat: one test."""

    workload: Workload
    direction: Timed
    contender: Contender

    @property
    def heat(self) -> tuple[str, Timed, str]:
        return self.workload.name, self.direction, self.workload.problem.id

    @property
    def group(self) -> str:
        return "-".join(self.heat)

    @property
    def id(self) -> str:
        return f"{self.group}-{self.contender.name}"

    @property
    def is_yardstick(self) -> bool:
        """Others' kernels are what is measured against: their faults fail nothing here."""
        return report.is_yardstick(self.contender.name)


class RacePlugin:
    """Hooks and the `heat` fixture for `test_race.py`.

    Its pytest-benchmark hooks are optional: the suite may run where that is not installed.

    pytest runs one test after another, contenders of a heat must take turns: so the first test of
    a heat runs all of it, and the others find their outcome waiting.
    """

    def __init__(self, options: RaceOptions, console: Console | None = None):
        self.options = options
        self.console = console
        self.outcomes: list[tuple[Entrant, Outcome]] = []
        self.output_json: dict[str, Any] | None = None
        self._fields: dict[tuple, list[Entrant]] = {}
        self._current: dict[Entrant, Outcome] = {}
        self._host_times: dict[str, dict[str, float | None]] = {}
        self._progress: Progress | None = None

    @cached_property
    def device(self) -> torch.device:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @cached_property
    def watch(self) -> timing.Stopwatch:
        return timing.stopwatch(self.device)

    @cached_property
    def matmul_tflops(self) -> float | None:
        if self.device.type == "cpu":
            return None
        return round(timing.matmul_tflops(self.watch, self.device), 1)

    def entrants(self) -> list[Entrant]:
        """Every test of the race, heat by heat. Raises ValueError for a selection of nothing."""
        options = self.options
        field = contenders(list(options.backends), list(options.against))
        return [
            Entrant(workload, direction, contender)
            for workload in workloads(
                options.workload, self.device, options.head_dims, options.seqlens
            )
            for direction in options.directions
            for contender in field
        ]

    def warm(self) -> None:
        """Compile what the race will need, in parallel. PyTorch's own kernels are compiled."""
        jobs = [
            Job(
                e.contender.name,
                e.workload.problem_for(e.direction),
                "forward" if e.direction == "forward" else "backward",  # autograd has no others
            )
            for e in self.entrants()
            if not isinstance(e.contender, SdpaContender)
            if e.contender.name != "reference"
            if not e.contender.why_not(e.workload.problem_for(e.direction))
        ]
        compile_all(jobs, Lab(self.device, self.console or Console()))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "entrant" in metafunc.fixturenames:
            entrants = self.entrants()
            metafunc.parametrize("entrant", entrants, ids=[entrant.id for entrant in entrants])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function) and "entrant" in item.fixturenames:
                entrant = item.callspec.params["entrant"]
                self._fields.setdefault(entrant.heat, []).append(entrant)
        if self.console is not None and self.console.is_terminal:
            self._progress = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("heats"), TimeElapsedColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self._progress.add_task("race", total=len(self._fields))
            self._progress.start()

    def pytest_sessionfinish(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._print(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A race without pytest's terminal still says why a test failed."""
        if report.failed:
            self._print(f"{report.nodeid}\n{report.longreprtext}")

    def _print(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @pytest.fixture
    def heat(self) -> Callable[[Entrant], Outcome]:
        """The outcome of one entrant, from the heat that it ran in."""
        return self._outcome

    def _outcome(self, entrant: Entrant) -> Outcome:
        if entrant not in self._current:
            self._current = self._run(self._fields[entrant.heat])
            self.outcomes += self._current.items()
        return self._current[entrant]

    def _run(self, field: list[Entrant]) -> dict[Entrant, Outcome]:
        first = field[0]
        matmul = self.matmul_tflops  # before the first heat, to warm the card up
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        rounds = self.options.rounds
        outcomes = run_heat(
            first.workload,
            first.direction,
            [entrant.contender for entrant in field],
            self.watch,
            self.device,
            budget=self.options.budget,
            rounds=rounds if rounds or self.device.type == "cuda" else CPU_ROUNDS,
        )
        for entrant in field:
            outcome = outcomes[entrant.contender.name]
            if outcome.verdict == "raced":
                outcome.info |= self._host(entrant.contender)
                if matmul:
                    share = 100 * outcome.info["tflops"] / matmul
                    outcome.info["pct_of_matmul"] = round(share, 1)
        self._say(field, outcomes, time.perf_counter() - start)
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])
        return {entrant: outcomes[entrant.contender.name] for entrant in field}

    def _host(self, contender: Contender) -> dict[str, float | None]:
        if contender.name not in self._host_times:
            self._host_times[contender.name] = host_times(contender, self.device)
        return self._host_times[contender.name]

    def _say(self, field: list[Entrant], outcomes: dict[str, Outcome], seconds: float) -> None:
        number = list(self._fields).index(field[0].heat) + 1
        results = ", ".join(
            f"{name} {_brief(outcome)}"
            for name, outcome in outcomes.items()
            if outcome.verdict != "skipped"
        )
        problem = field[0].workload.problem
        label = f"{field[0].workload.name} d{problem.head_dim} n{problem.seqlen_q}"
        label += " causal" * problem.is_causal
        self._print(
            f"[{number}/{len(self._fields)}] {field[0].direction} {label} "
            f"({seconds:.1f} s): {results or 'nobody could race'}"
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        system = {key: machine_info[key] for key in ("system", "machine", "python_implementation")}
        machine_info.clear()  # a host's name and its compiler's say nothing about its speed
        machine_info.update(system)
        machine_info.update(machine.describe())  # now, at the end: the clocks of a warm card
        machine_info["device"] = self.device.type
        machine_info["matmul_tflops"] = self.matmul_tflops

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_commit_info(self, commit_info: dict[str, Any]) -> None:
        commit = machine.commit()  # pytest-benchmark would look at the directory that it runs in
        commit_info.clear()
        commit_info.update(id=commit, dirty=bool(commit and commit.endswith("-dirty")))

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_json(self, output_json: dict[str, Any]) -> None:
        self._name_default_kernels()
        for record in output_json["benchmarks"]:
            record["params"] = None  # the test's name says it
            record["options"] = {"timer": record["options"]["timer"]}  # no other was in use
            record["stats"] = {key: _rounded(value) for key, value in record["stats"].items()}
        output_json["no_number"] = [
            {key: record[key] for key in NO_NUMBER_KEYS} for record in self.without()
        ]
        self.output_json = output_json

    def _name_default_kernels(self) -> None:
        """Which kernel SDPA picked by itself; last, because profiling slows what comes after it."""
        if self.device.type == "cpu":
            return
        for entrant, outcome in self.outcomes:
            contender = entrant.contender
            if outcome.verdict != "raced" or not isinstance(contender, SdpaContender):
                continue
            if contender.kernel is None and "kernel" not in outcome.info:
                problem = entrant.workload.problem_for(entrant.direction)
                inputs = entrant.workload.load(self.device)
                run = contender.prepare(entrant.direction, inputs, problem)
                run()
                kernel = longest_kernel(run)
                outcome.info |= {"kernel": kernel, "ran": sdpa_family(kernel)}

    def records(self) -> list[dict[str, Any]]:
        """extra_info of what has a number."""
        return [outcome.info for _, outcome in self.outcomes if outcome.verdict == "raced"]

    def without(self) -> list[dict[str, Any]]:
        """What has none, with the verdict and the reasons."""
        return [
            outcome.info | {"verdict": outcome.verdict, "reasons": outcome.reasons}
            for _, outcome in self.outcomes
            if outcome.verdict != "raced"
        ]

    def failures(self) -> list[tuple[Entrant, Outcome]]:
        """Backends of the registry that were wrong, or raised."""
        return [
            (entrant, outcome)
            for entrant, outcome in self.outcomes
            if outcome.verdict in ("wrong", "failed") and not entrant.is_yardstick
        ]

    def tables(self) -> Group:
        """The race as rich tables, and the reasons for what is missing from them."""
        records, without = self.records(), self.without()
        shown: list[Table | Text] = []
        if self.device.type == "cpu":
            shown.append(report.correctness_table(records, without))
        else:
            shown += report.speed_tables(records, without, self.matmul_tflops)
            if (summary := report.summary_table(records)) is not None:
                shown.append(summary)
        return Group(*shown, *map(Text, report.notes(without)))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The tables, in a plain pytest run."""
        if self.outcomes:
            terminalreporter.section("flash-rosetta race")
            console = Console(width=WIDTH)
            with console.capture() as capture:
                console.print(self.tables())
            terminalreporter.write_line(capture.get())


def _brief(outcome: Outcome) -> str:
    if outcome.verdict != "raced":
        return outcome.verdict.upper()
    tflops = outcome.info["tflops"]
    return "right" if tflops is None else report.short(tflops)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return significant(value) if isinstance(value, float) else value
