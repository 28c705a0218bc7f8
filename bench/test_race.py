"""The race as pytest-benchmark sees it: one test for each workload, direction and contender.

`flash-rosetta race` runs this file, and so does `pytest bench/test_race.py`; the parameters are
made in `plugin.py`.
"""

import pytest

from flash_rosetta.bench.timing import REPLAY


@pytest.mark.benchmark(timer=REPLAY)
def test_race(entrant, heat, benchmark):
    outcome = heat(entrant)
    if outcome.verdict == "skipped":
        pytest.skip("; ".join(outcome.reasons))
    if outcome.verdict != "raced":
        report = f"{entrant.id}: {outcome.verdict}\n" + "\n".join(outcome.reasons)
        if entrant.is_yardstick:
            pytest.skip(report)
        pytest.fail(report, pytrace=False)
    benchmark.group = entrant.group
    benchmark.extra_info = outcome.info  # itself, no copy: the JSON has what is added later
    REPLAY.load(outcome.seconds)
    benchmark.pedantic(lambda: None, rounds=len(outcome.seconds))
