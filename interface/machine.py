"""What this machine is: card, driver, versions, commit, as plain JSON values. Changes nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

COMMIT_VARIABLE = "FLASH_ROSETTA_COMMIT"
"""Names the commit on a machine to which the files were copied without their git history."""

PACKAGES = ("triton", "tilelang", "nvidia-cutlass-dsl", "flash-attn-4", "numpy")

_SMI_FIELDS = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
}


def describe(device: int | None = None) -> dict[str, Any]:
    """Card, driver, versions and commit; a key whose value cannot be had here is None.

    `device` is a CUDA device index, the current one if left out. Sizes ending in `_bytes` are
    bytes. Clocks, temperature and power are those of the moment. Imports no DSL.
    """
    return {
        "commit": commit(),
        "flash-rosetta": package_version("flash-rosetta"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch": str(torch.__version__),
        **{package: package_version(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        **_card(device),
    }


def sensors(device: torch.device) -> dict[str, float | None]:
    """The card's clock in MHz, temperature in Celsius and power in W at this moment; only read.

    None for what cannot be had, and everywhere but on an NVIDIA GPU.
    """
    keys = ("sm_clock_mhz", "temperature_c", "power_w")
    if device.type != "cuda":
        return dict.fromkeys(keys)
    try:  # a fraction of a millisecond, where nvidia-ml-py is installed
        return {
            "sm_clock_mhz": float(torch.cuda.clock_rate(device)),
            "temperature_c": float(torch.cuda.temperature(device)),
            "power_w": torch.cuda.power_draw(device) / 1e3,
        }
    except Exception:  # what is missing, and how it says so, differs between machines
        card = _card(device.index)
        return {key: card[key] for key in keys}


def commit() -> str | None:
    """The commit of the checkout that this code runs from, with "-dirty" when files were modified.

    Files under bench/results do not count as modified: results are data, and the commit names the
    code that made them. The environment variable FLASH_ROSETTA_COMMIT says it for a copy of a
    checkout without its history, and has precedence.
    """
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results"
    )
    return f"{head}-dirty" if changes else head


def _git(*arguments: str) -> str | None:
    return _output("git", "--no-optional-locks", "-C", str(Path(__file__).parent), *arguments)


def _output(*command: str) -> str | None:
    """What `command` prints, or None when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_version(package: str) -> str | None:
    """The installed version of a package, None if it is not installed. Imports nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cudnn_version() -> str | None:
    number = torch.backends.cudnn.version()  # 91900 is 9.19.0
    if number is None:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _card(device: int | None) -> dict[str, Any]:
    card: dict[str, Any] = dict.fromkeys(
        (
            "card",
            "compute_capability",
            "multiprocessors",
            "memory_bytes",
            "l2_bytes",
            "shared_bytes_per_block",
            *_SMI_FIELDS,
        )
    )
    if not torch.cuda.is_available():
        return card
    properties = torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    )
    card |= {
        "card": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        # NVIDIA only; the default limit of 48 KB is not what a kernel can ask for.
        "shared_bytes_per_block": getattr(properties, "shared_memory_per_block_optin", None),
    }
    printed = _output(
        "nvidia-smi",
        f"--id=GPU-{properties.uuid}",
        f"--query-gpu={','.join(_SMI_FIELDS.values())}",
        "--format=csv,noheader,nounits",
    )
    if printed:
        card |= dict(zip(_SMI_FIELDS, printed.split(", "), strict=True))
        for key in _SMI_FIELDS.keys() - {"driver"}:
            card[key] = _number(card[key])
    return card


def _number(text: str) -> float | None:
    """The number that nvidia-smi printed; None for "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None
