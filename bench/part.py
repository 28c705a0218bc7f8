"""One part of a report in a process of its own: `python -m flash_rosetta.bench.part NAME FILE`.

A fault that loses the device, or ends the process, so costs no other part anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import traceback
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Measure the part and write it to the file: with an `error` where it failed, then return 1."""
    parser = argparse.ArgumentParser(prog="python -m flash_rosetta.bench.part")
    parser.add_argument("name", help="of flash_rosetta.bench.parts.PARTS")
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", action="append", default=[], metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args(argv)

    import torch

    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read once, when Triton is imported
    from flash_rosetta import machine
    from flash_rosetta.bench.parts import Lab, as_part

    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    lab = Lab(device, backends=tuple(arguments.backend), is_quick=arguments.quick)
    try:
        part = as_part(arguments.name, lab)
    except Exception as error:
        traceback.print_exc()
        part = {
            "datetime": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine_info": machine.describe(),
            "records": [],
            "error": traceback.format_exception_only(error)[-1].strip(),
        }
    arguments.file.write_text(json.dumps(part), encoding="utf-8")
    return int("error" in part)


if __name__ == "__main__":
    sys.exit(main())
