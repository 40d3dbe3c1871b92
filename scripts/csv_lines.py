"""Lines of a CSV file, by the engine that they are about."""

import csv
from collections.abc import Sequence
from pathlib import Path

ENGINE = ("target", "model", "seqs")


def replace_lines(path: Path, fields: Sequence[str], rows: list[dict], engine: Sequence[str] = ENGINE) -> None:
    """Replace the lines of the same engines; others stay.

    Args:
        fields: columns of the file.
        engine: those that tell engines apart.
    """
    new = {tuple(str(row[key]) for key in engine) for row in rows}
    kept = []
    if path.exists():
        with path.open(newline="") as file:
            kept = [row for row in csv.DictReader(file) if tuple(row[key] for key in engine) not in new]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows([*kept, *rows])
