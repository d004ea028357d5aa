"""Shows what differs between the recorded files and what today's code gives, or records that.

    python tests/golden/update.py [--accept]

Without --accept it exits 1 where anything differs. It computes every cell of the matrix, which takes minutes. Where no
part behaves otherwise than was recorded of its version, it records the definitions too (hpo.declaration.code_digest):
by them an installation knows that it is not modified.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import golden_behaviour
import golden_record

from hpo.declaration import code_digest

BEHAVIOUR = "behaviour.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the golden files with today's code.")
    parser.add_argument("--accept", action="store_true", help="write what today's code gives")
    accept = parser.parse_args().accept
    now = golden_record.computed("--all")
    changes = _changes(now)
    refused = [*golden_behaviour.refusals(golden_record.recorded(BEHAVIOUR), now[BEHAVIOUR])]
    behaves = not any(line.startswith(BEHAVIOUR) for line in changes)
    if behaves or (accept and not refused):
        code_digest.record()
    if not changes:
        print("Nothing differs from the golden files.")
        return 0
    print("\n".join([*changes, *refused]))
    if accept and refused:
        print("Nothing is recorded.")
        return 1
    if accept:
        _record(now)
        print(f"These differences are written to {golden_record.HERE.name}/: review them with `git diff`.")
        return 0
    print(golden_record.ACCEPT)
    return 1


def _changes(now: dict[str, Any]) -> list[str]:
    names = golden_record.recorded_names()
    lines = [f"{name} is not recorded" for name in now if name not in names]
    lines += [f"{name} is recorded and not given any more" for name in names if name not in now]
    for name in (name for name in names if name in now):
        lines += golden_record.differences(name, golden_record.recorded(name), now[name])
    return lines


def _record(now: dict[str, Any]) -> None:
    for name in golden_record.recorded_names():
        if name not in now:
            (golden_record.HERE / name).unlink()
    for name, content in now.items():
        golden_record.write(name, content)


if __name__ == "__main__":
    sys.exit(main())
