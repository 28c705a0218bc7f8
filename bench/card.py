"""A file of results: what was measured on one card, the race and the parts beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flash_rosetta.bench.report import Record

Card = dict[str, Any]
"""pytest-benchmark's JSON of the race, with `no_number` and `parts`: see bench/results/README.md.

A part that failed has an `error`, one line; so has the card itself where the race failed.
"""


def empty(machine_info: dict[str, Any], datetime: str) -> Card:
    """A card on which nothing has been measured yet."""
    return {
        "machine_info": machine_info,
        "datetime": datetime,
        "no_number": [],
        "benchmarks": [],
        "parts": {},
    }


def read(path: Path) -> Card:
    """The card in a file. ValueError, with the path, for a file that holds none."""
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must hold the JSON of a race, got {error}") from error
    if not isinstance(card, dict) or not {"machine_info", "benchmarks"} <= card.keys():
        raise ValueError(f"{path} must hold machine_info and benchmarks, as a race writes them")
    return card


def write(card: Card, path: Path) -> None:
    """JSON with one line for each record, so that a change is read as such.

    The file is replaced whole: who stops in the middle keeps the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(_json(card, "") + "\n", encoding="utf-8")
    new.replace(path)


def _json(value: Any, indent: str) -> str:
    """Objects down to lists of objects over several lines, an item of such a list in one."""
    inner = indent + " "
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lines = (json.dumps(item, ensure_ascii=False) for item in value)
        return "[\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}]"
    if isinstance(value, dict) and value:
        lines = (f"{json.dumps(key)}: {_json(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    return json.dumps(value, ensure_ascii=False)


def digest(path: Path) -> str:
    """What names a file's content: what was made of it says of which content it was made."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def records(card: Card) -> list[Record]:
    """The race's records: one contender in one heat each."""
    return [benchmark["extra_info"] for benchmark in card["benchmarks"]]


def name(card: Card) -> str:
    """The card's name, or that there was none."""
    found: str | None = card["machine_info"].get("card")
    return found or "no GPU"


def slug(card_name: str | None) -> str:
    """A card's name as a file's: "NVIDIA H200" is nvidia-h200, none is cpu."""
    text = "".join(c if c.isalnum() else " " for c in (card_name or "cpu").lower())
    return "-".join(text.split())
