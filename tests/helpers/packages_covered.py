"""Prints branch coverage by package, from what `make coverage` has measured."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import coverage


def measured() -> dict[str, Any]:
    """What coverage says of each file."""
    data = coverage.Coverage()
    data.load()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        data.json_report(outfile=str(report))
        return json.loads(report.read_text())["files"]


def by_package(files: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Statements and branches, there and run, of each package and of all below it."""
    sums: dict[str, Counter[str]] = {}
    for path, of in files.items():
        parts = PurePath(path).parts
        start = max(at for at, part in enumerate(parts) if part in ("hpo", "trainer"))
        counts = {key: count for key, count in of["summary"].items() if isinstance(count, int)}
        for name in {parts[start], "/".join(parts[start:-1][:2])}:
            sums.setdefault(name, Counter()).update(counts)
    return sums


def main() -> None:
    print(f"{'package':22}{'statements':>11}{'run':>9}{'branches':>10}{'taken':>9}{'both':>9}")
    for name, n in sorted(by_package(measured()).items()):
        lines, branches = n["num_statements"], n["num_branches"]
        run, taken = n["covered_lines"], n["covered_branches"]
        both = (run + taken) / (lines + branches)
        print(f"{name:22}{lines:>11}{run / lines:>9.2%}{branches:>10}{taken / max(branches, 1):>9.2%}{both:>9.2%}")


if __name__ == "__main__":
    main()
