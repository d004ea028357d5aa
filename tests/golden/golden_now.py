"""Computes what the golden files record; golden_record.py starts it with the processor pinned.

    python golden_now.py OUTPUT.json [--all] [--only matrix.json]

`--all` computes every cell of the matrix, and not a sample; `--only` computes the one file that it names.
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
        "libc": " ".join(platform.libc_ver()),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def main() -> None:
    importlib.metadata.version = functools.cache(importlib.metadata.version)  # each study that opens asks for ten
    sys.path[1:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", choices=["matrix.json"])
    given = parser.parse_args()
    given.output.write_text(json.dumps(computed(given.only, every=given.all) | {"platform.json": platform_facts()}))


def computed(only: str | None, *, every: bool) -> dict[str, Any]:
    """Returns file name -> content, and the digest of the resumed study under `home`."""
    import golden_matrix
    import golden_studies
    import golden_surface

    from hpo.home import Home
    from hpo.ledger import Ledger

    with tempfile.TemporaryDirectory(prefix="hpo-golden-") as directory:
        home = Home(Path(directory))
        with closing(Ledger(home.storage)) as ledger:
            made: dict[str, Any] = {"matrix.json": golden_matrix.matrix(ledger, home, every=every)}
            if only is None:
                made |= golden_studies.studies(ledger, home) | golden_surface.surface()
                made["home"] = golden_studies.resumed(home.root / "unpacked")
    return made


if __name__ == "__main__":
    main()
