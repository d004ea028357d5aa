"""Compares Python and the installed packages with what hpo needs and is tested with."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.doctor.finding import Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TESTED = Path(__file__).parents[2] / "lock.txt"  # in a clone; an installed package has none
PURPOSES = {
    "train": "training with PyTorch; samplers gp, freeze-thaw",
    "ui": "MLflow's pages (hpo ui)",
    "report": "one page that tells a study (hpo report)",
    "serve": "live pages (hpo serve)",
    "metrics": "figures for Prometheus (hpo serve, hpo worker)",
    "plots": "figures and pictures (hpo plot)",
    "dashboard": "optuna-dashboard's pages (hpo ui --optuna)",
    "postgres": "a ledger in PostgreSQL (--storage)",
    "s3": "checkpoints (--checkpoints) and data in s3://",
    "datasets": "directories of Hugging Face's datasets",
    "tfrecord": "TFRecord files; models of SentencePiece",
    "ray": "--executor ray and ray-tune",
    "tensorboard": "--tracker tensorboard:DIR",
    "wandb": "--tracker wandb:DIR; hpo import wandb",
    "apprise": "--alert to a chat or by mail",
    "gpu": "load, power and temperature of NVIDIA's GPUs",
    "text": "BPE tokenizers",
    "clean": "the language of texts (studies._lm.clean)",
    "images": "data sets in folders of images",
    "llm": "language models (lora, dpo, online, Hugging Face)",
    "fp8": "train.precision=fp8",
    "onnx": "models as ONNX (hpo export)",
    "gguf": "language models as GGUF (hpo export)",
    "lightning": "hpo.integrations.lightning",
    "keras": "hpo.integrations.keras",
    "xgboost": "hpo.integrations.xgboost",
    "lightgbm": "hpo.integrations.lightgbm",
}


def interpreter() -> Iterator[Finding]:
    """Yields Python's version and the platform."""
    from hpo.declaration.environment import release

    text = f"hpo {release()}, Python {platform.python_version()} ({sys.executable}), {platform.platform()}"
    from packaging.specifiers import SpecifierSet

    if version_of("hpo") is None:
        checkout = Path(__file__).parents[2]
        yield Finding(
            "python", "fails", f"{text}; hpo runs from {checkout} without an install", f"pip install -e {checkout}"
        )
        return
    wanted = metadata.metadata("hpo")["Requires-Python"] or ""
    if platform.python_version() not in SpecifierSet(wanted, prereleases=True):
        yield Finding("python", "fails", text, f"hpo needs Python {wanted}: make an environment with it.")
    else:
        yield Finding("python", "ok", text)


def installed(required: list[str] | None = None) -> Iterator[Finding]:
    """Yields required packages that are missing or too old, and the differences from the tested versions."""
    tested, differ = _tested(), []
    for requirement in _requirements(required, ""):
        version = version_of(requirement.name)
        pinned = tested.get(_plain(requirement.name))
        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        if version is None:
            yield Finding("packages", "fails", f"{requirement.name} is not installed", fix)
        elif version not in requirement.specifier:
            yield Finding("packages", "fails", f"{requirement.name} {version} is not {requirement.specifier}", fix)
        elif pinned and version.partition("+")[0] != pinned:
            differ.append(f"{requirement.name} {version} (tested: {pinned})")
    if differ:
        fix = "`make clean hpo-setup` installs the tested ones; figures may differ in their last digits."
        yield Finding("packages", "note", f"other versions than the tested ones: {', '.join(differ)}", fix)
    elif tested:
        yield Finding("packages", "ok", "the versions are those that hpo is tested with")


def extras(required: list[str] | None = None) -> Iterator[Finding]:
    """Yields a row for each extra: its name, what it is for, and its versions or the command that installs it."""
    names = metadata.metadata("hpo").get_all("Provides-Extra") or [] if version_of("hpo") else []
    offered = [name for name in (*PURPOSES, *sorted({*names} - PURPOSES.keys())) if name in names]
    for extra in offered:
        versions = {need.name: _fitting(need) for need in _requirements(required, extra)}
        missing = not all(versions.values())
        fix = f"pip install 'hpo[{extra}]'" if missing else ""
        state = fix or ", ".join(f"{name} {version}" for name, version in versions.items())
        yield Finding("extras", "ok", f"{extra:<12} {PURPOSES.get(extra, ''):<48} {state}", fix)


def _fitting(need: Requirement) -> str | None:
    """Returns the installed version; None if there is none or it does not fit."""
    version = version_of(need.name)
    return version if version is not None and version in need.specifier else None


def version_of(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(required: list[str] | None, extra: str) -> list[Requirement]:
    """Returns hpo's requirements on this platform: those of `extra`, or the basic ones if it is empty."""
    from packaging.requirements import Requirement

    if required is None:
        required = metadata.requires("hpo") or [] if version_of("hpo") else []
    every = map(Requirement, required)
    of_extra = [need for need in every if bool(need.marker and "extra" in str(need.marker)) is bool(extra)]
    return [need for need in of_extra if need.marker is None or need.marker.evaluate({"extra": extra})]


def _tested() -> Mapping[str, str]:
    if not TESTED.is_file():
        return {}
    pins = re.findall(r"^([\w.-]+)==([\w.!-]+) ", TESTED.read_text(encoding="utf-8"), re.MULTILINE)
    return {_plain(name): version for name, version in pins}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503
