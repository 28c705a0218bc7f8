"""Counts what became of each backend's tests, and why the skipped ones were skipped."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest

NO_BACKEND = "(none)"
"""Stands for the backend of tests that are about none."""

REASONS_SHOWN = 12
"""Reasons for skips printed for one backend; the rest is counted."""

OUTCOMES = ("passed", "failed", "xfailed", "skipped")


@dataclass
class Tally:
    """Outcomes of one backend's tests, and how often each reason to skip was given."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def executed(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["skipped"]


class Tallies:
    """A pytest plugin: fills a tally for each backend, prints them, and fails an idle run."""

    def __init__(self, must_run: Collection[str]):
        self.must_run = must_run
        self.of: defaultdict[str, Tally] = defaultdict(Tally)

    def idle(self) -> list[str]:
        """Backends that were to be tested and of which no test was executed."""
        skipped_only = {name for name, tally in self.of.items() if not tally.executed}
        never_seen = set(self.must_run) - self.of.keys()
        return sorted((skipped_only | never_seen) - {NO_BACKEND})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        tally = self.of[str(dict(report.user_properties).get("backend", NO_BACKEND))]
        if hasattr(report, "wasxfail"):
            tally.outcomes["xfailed" if report.skipped else "failed"] += 1
        elif report.skipped:
            tally.outcomes["skipped"] += 1
            tally.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1  # type: ignore[index]
        elif report.failed or report.when == "call":
            tally.outcomes[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        collect_only = session.config.getoption("collectonly")
        if self.idle() and not collect_only and session.exitstatus in (0, 5):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
    ) -> None:
        usage_error = exitstatus == pytest.ExitCode.USAGE_ERROR
        if usage_error or config.getoption("collectonly") or not (self.of or self.idle()):
            return
        terminalreporter.section("flash-rosetta conformance")
        width = max(map(len, ["backend", *self.of]))
        terminalreporter.line(
            f"{'backend':<{width}}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)
        )
        for name, tally in self.of.items():
            counts = "".join(f"{tally.outcomes[outcome]:>9}" for outcome in OUTCOMES)
            terminalreporter.line(f"{name:<{width}}{counts}")
        for name, tally in self.of.items():
            for reason, count in tally.reasons.most_common(REASONS_SHOWN):
                terminalreporter.line(f"{name} skipped {count}: {reason}")
            if (rest := len(tally.reasons) - REASONS_SHOWN) > 0:
                terminalreporter.line(f"{name}: {rest} more reasons; -rs prints all")
        for name in self.idle():
            terminalreporter.line(
                f"ERROR: backend {name!r} was to be tested, but no test of it was executed",
                red=True,
            )
