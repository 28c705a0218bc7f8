"""The race: registered backends against PyTorch's own attention, on the same tensors and card.

`race.py` is the command, `test_race.py` what pytest-benchmark runs, `plugin.py` what joins them.
`workloads.py` says what is raced, `contenders.py` who races, `heat.py` in which order, `judge.py`
who was right, `timing.py` and `host.py` how long it took; `report.py` and `readme.py` show it.
"""
