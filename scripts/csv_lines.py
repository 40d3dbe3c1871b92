"""Lines of a CSV file, by the engine that they are about."""

import csv
from collections.abc import Sequence
from pathlib import Path

ENGINE = ("target", "model", "seqs")


def replace_lines(path: Path, fields: Sequence[str], rows: list[dict]) -> None:
    """Replace the lines of the same engines, by the columns `ENGINE`; others stay. Args: fields: of the file."""
    new = {tuple(str(row[key]) for key in ENGINE) for row in rows}
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if tuple(row[key] for key in ENGINE) not in new]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows([*kept, *rows])
