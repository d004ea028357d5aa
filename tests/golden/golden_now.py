"""Computes what the golden files record; golden_record.py starts it with the processor pinned.

    python golden_now.py OUTPUT.json [--all | --behaviour]

Without --all it leaves out what takes long: studies of language models, whose libraries take seconds to import, most
cells of the matrix, and the digests of parts, which --behaviour computes alone.
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
    sys.path[1:1] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--behaviour", action="store_true")
    options = parser.parse_args()
    content = behaviour_alone() if options.behaviour else computed(every=options.all)
    options.output.write_text(json.dumps(content | {"platform.json": platform_facts()}))


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
        made["behaviour.json"] = None
        if every:
            import golden_behaviour

            made["behaviour.json"] = golden_behaviour.digests(made, every=True)
        return made | {"home.json": golden_studies.resumed(home.root / "unpacked"), **golden_surface.surface()}


def behaviour_alone() -> dict[str, Any]:
    """Returns the digests of parts but for those of the bundled studies, which the rest computes."""
    import golden_behaviour
    import golden_studies

    runs = {f"studies/{name}.json": None for name in golden_studies.SMALL}
    return {"behaviour.json": golden_behaviour.digests(runs, every=False)}


if __name__ == "__main__":
    main()
