"""Describes where a study runs: versions, host, git commit. All is recorded, and part of it is watched for drift."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.declaration import content
from hpo.version import VERSION

if TYPE_CHECKING:
    from hpo.declaration.study import Study

_DECIDING = ("torch", "numpy", "scipy", "scikit-learn", "optuna", "cmaes")  # another version may draw other numbers
_PACKAGES = (*_DECIDING, "mlflow-skinny", "sqlalchemy", "pydantic", "safetensors")


def deciding_versions() -> str:
    """Returns the versions that proposals and weights depend on, and MKL's rounding mode (`trainer` sets a default).

    A change is drift.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"python": python} | _versions(_DECIDING) | {"MKL_CBWR": os.environ.get("MKL_CBWR")}
    return " ".join(f"{name} {version}" for name, version in versions.items())


def describe(study: Study) -> dict[str, Any]:
    """Returns host, platform, versions and, if the study's code is in a git checkout, its commit."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"hpo": VERSION} | _versions(_PACKAGES),
        "git": git_commit(content.directory(study)),
    }


def release() -> str:
    """Returns hpo's version, and in a git clone its commit: `0.2.0 (1a2b3c4d, modified)`."""
    clone = Path(__file__).parents[2]
    git = git_commit(clone) if (clone / ".git").exists() else None  # not the repository that contains an environment
    if git is None:
        return VERSION
    return f"{VERSION} ({git['commit'][:8]}{', modified' if git['dirty'] else ''})"


def git_commit(directory: Path) -> dict[str, Any] | None:
    """Returns {"commit", "dirty"} of the checkout that holds `directory`; None outside one, or without git."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(directory, "status", "--porcelain", "--untracked-files=no"))}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
