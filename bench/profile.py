"""What Nsight Compute says of the kernels at head_dim 128: six of them, in three languages."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from flash_rosetta import registry
from flash_rosetta.bench.ladder import varied
from flash_rosetta.bench.parts import Lab, Record
from flash_rosetta.bench.profile_page import sections
from flash_rosetta.bench.profile_target import problem_on

__all__ = ["measure", "sections"]

TIMEOUT = 120.0
"""Seconds for one backend."""

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
    "Occupancy",
    "LaunchStats",
)
METRICS = {
    "time_us": ("gpu__time_duration.sum", 1e6),
    "dram_read_mb": ("dram__bytes_read.sum", 1e-6),
    "dram_write_mb": ("dram__bytes_write.sum", 1e-6),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1.0),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
    "shared_dynamic_kb": ("launch__shared_mem_per_block_dynamic", 1 / 1024),
    "block": ("launch__block_size", 1.0),
    "grid": ("launch__grid_size", 1.0),
}
"""A figure's key in the records: Nsight Compute's metric, and what takes its unit to ours."""

ASKED_FOR = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
"""Metrics that the sections do not have. One that a card lacks would end ncu: so no more."""

TENSOR = re.compile(r"sm__(inst_executed_)?pipe_tensor\w*\.avg\.pct_of_peak_sustained_active")
"""How busy the tensor pipes are: cards name it differently, and the highest figure is taken."""

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
"""Why warps did not issue: how many were in a state, on average, for each instruction issued."""

UNITS = {
    "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6,
    "ms": 1e-3, "s": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
    "byte/block": 1.0, "Kbyte/block": 1e3, "Mbyte/block": 1e6,
}  # fmt: skip


def measure(lab: Lab) -> list[Record]:
    """A record for each kernel launched; for a backend that could not be profiled, why not."""
    records: list[Record] = []
    for name in lab.track(varied(lab), "profile"):
        if reasons := registry.why_not(name, problem_on(lab.device)):
            records.append({"backend": name, "verdict": "skipped", "reasons": reasons})
            continue
        try:
            records += _profile(name)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            records.append({"backend": name, "verdict": "failed", "reasons": [str(error)]})
    return records


def _profile(name: str) -> list[Record]:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ValueError("ncu, Nsight Compute's command, is not on the PATH")
    command = [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off",
        "--clock-control", "none", "--nvtx", "--metrics", ",".join(ASKED_FOR),
        *(word for section in SECTIONS for word in ("--section", section)),
        sys.executable, "-m", "flash_rosetta.bench.profile_target", name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    rows = list(_rows(done.stdout))
    if not rows:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise ValueError(f"ncu found no kernel: {said[-1] if said else 'it said nothing'}")
    records = []
    for row, units in rows:
        record: Record = {
            "backend": name,
            "verdict": "profiled",
            "reasons": [],
            "direction": _direction(row),
            "kernel": row["Kernel Name"].partition("(")[0],
        }
        for key, (metric, factor) in METRICS.items():
            record[key] = _number(row, units, metric, factor)
        tensor = [
            _number(row, units, metric, 1.0)
            for metric in row
            if metric and TENSOR.fullmatch(metric)
        ]
        record["tensor_pct"] = max((value for value in tensor if value is not None), default=None)
        record["stalls"] = {
            match[1]: value
            for metric in row
            if metric and (match := STALL.fullmatch(metric))
            if (value := _number(row, units, metric, 1.0)) is not None
        }
        records.append(record)
    return records


def _rows(text: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """The kernels of ncu's CSV, with the units of its columns; what else it printed is left out."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    reader = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    units: dict[str, str] = {}
    for row in reader:
        if not row["ID"]:
            units = row  # the line below the header
        else:
            yield row, units


def _direction(row: dict[str, str]) -> str:
    """In which of the target's ranges a kernel was launched."""
    ranges = " ".join(str(value) for key, value in row.items() if key and "NVTX" in key.upper())
    ranges += " ".join(str(value) for key, value in row.items() if key and "Push/Pop" in key)
    return "backward" if "backward" in ranges else "forward" if "forward" in ranges else "unknown"


def _number(row: dict[str, str], units: dict[str, str], metric: str, factor: float) -> float | None:
    """A metric's value in our unit; None where this ncu or this card has none."""
    text = (row.get(metric) or "").replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return float(f"{value * UNITS.get(units.get(metric) or '', 1.0) * factor:.5g}")
