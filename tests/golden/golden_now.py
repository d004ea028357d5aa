"""Computes what the golden files record; golden_record.py starts it with the processor pinned.

    python golden_now.py OUTPUT.json [--all]

Without --all it leaves out what takes long: studies of language models, whose libraries take seconds to import, and
most cells of the matrix.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import platform
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "scipy", "scikit-learn", "optuna", "cmaes", "transformers", "peft")


def platform_facts() -> dict[str, Any]:
    """Returns what the numbers may depend on."""
    import torch

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "avx512": "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
        "libc": " ".join(platform.libc_ver()),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def main() -> None:
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # each study that opens asks for ten
    sys.path[1:1] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    given.output.write_text(json.dumps(computed(every=given.all) | {"platform.json": platform_facts()}))


def computed(*, every: bool) -> dict[str, Any]:
    """Returns file name -> content of all files but platform.json."""
    import golden_matrix
    import golden_studies
    import golden_surface

    from hpo.ledger import Ledger
    from hpo.storage.home import Home

    with tempfile.TemporaryDirectory(prefix="hpo-golden-") as directory:
        home = Home(Path(directory))
        with closing(Ledger(home.storage)) as ledger:
            made: dict[str, Any] = {"matrix.json": golden_matrix.matrix(ledger, home, every=every)}
            made |= golden_studies.studies(ledger, home, every=every)
        return made | {"home.json": golden_studies.resumed(home.root / "unpacked"), **golden_surface.surface()}


if __name__ == "__main__":
    main()
