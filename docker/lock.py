"""Writes docker/locked/: what the images install, by hashes, at the versions of constraints.txt.

platform.txt is what every image of hpo has, cuda.txt is torch and NVIDIA's libraries from PyPI, mlflow.txt is the
server's. cpu.txt, torch alone, comes from PyTorch's own index and is kept by hand.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKED = ROOT / "docker" / "locked"
EXTRAS = ("plots", "postgres", "ray", "s3")
SERVER = ("mlflow[auth]", "boto3", "psycopg[binary]")
_WITH_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")


def compiled(requirements: str, *arguments: str) -> list[str]:
    """One text a package: name, version and hashes, for CPython 3.11 on x86-64 and, by their hashes, any other."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += ["-c", "constraints.txt", requirements, *arguments]
    asked = "\n".join(SERVER) if requirements == "-" else None
    done = subprocess.run(command, cwd=ROOT, input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return re.findall(r"^\S.*(?:\n\s+.*)*\n", done.stdout, re.MULTILINE)


def main() -> None:
    platform = compiled("pyproject.toml", *(word for extra in EXTRAS for word in ("--extra", extra)))
    files = {
        "platform.txt": [package for package in platform if not _WITH_TORCH.match(package)],
        "cuda.txt": [package for package in platform if _WITH_TORCH.match(package)],
        "mlflow.txt": compiled("-"),
    }
    for name, packages in files.items():
        (LOCKED / name).write_text("# Written by docker/lock.py.\n" + "".join(packages))


if __name__ == "__main__":
    main()
