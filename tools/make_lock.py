"""Writes lock.txt: each package that pyproject.toml leads to, by hash, with its size and the extras that need it.

`make lock` keeps the versions that still fit pyproject.toml; `make lock UPGRADE=1` takes the newest. uv resolves for
CPython 3.11 to 3.13 on Linux. PyTorch's CPU build lies on PyTorch's own index, so its entry is kept by hand.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename
from setup_env import CPU_BUILD, CPU_INDEX, CUDA_BUILD, Entry, declared, fingerprint, read_lock

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
CUDA = re.compile(r"torch|triton|nvidia-.*|cuda-.*")  # PyPI's build of PyTorch, and what it alone needs
HEADER = """\
# Written by `make lock`, of pyproject.toml {fingerprint}.
# Above each package: bytes to download and on the disk (CPython 3.11, x86-64), then the extras and groups that need it.
"""


def resolved(pins: Path, *arguments: str, stdin: str = "") -> list[dict[str, Any]]:
    """Returns the packages that `arguments` lead to, at the versions of `pins`, as pylock.toml has them."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "pylock.toml"
        _compile("-c", str(pins), "--format", "pylock.toml", "-o", str(output), *arguments, stdin=stdin)
        return tomllib.loads(output.read_text(encoding="utf-8")).get("packages", [])


def pinned(entries: list[Entry], pins: Path, names: dict[str, list[str]], upgrade: bool) -> None:
    """Writes into `pins` one version for each package, the locked one where it still fits."""
    pins.write_text("".join(f"{entry.name}=={entry.version}\n" for entry in entries if "+" not in entry.version))
    arguments = [word for words in names.values() for word in words]
    _compile("-o", str(pins), "--no-annotate", "--no-header", *arguments, *(["--upgrade"] if upgrade else []))


def _compile(*arguments: str, stdin: str = "") -> None:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--no-build"]
    command += ["--python-version", PYTHONS[0], *arguments, *(["-"] if stdin else [])]
    subprocess.run(command, cwd=ROOT, input=stdin, text=True, stdout=subprocess.DEVNULL, check=True)


def marker_of(package: dict[str, Any]) -> str:
    """Returns the package's marker without the parts that hold on every system the lock is for."""
    marker = package.get("marker", "")
    systems = [
        {"python_version": python, "python_full_version": f"{python}.99", "platform_machine": machine}
        | {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
        | {"platform_python_implementation": "CPython"}
        for python in PYTHONS
        for machine in MACHINES
    ]
    first = systems[0] | {"python_full_version": f"{PYTHONS[0]}.0"}
    if not marker or all(Marker(marker).evaluate(system) for system in [first, *systems]):
        return ""
    versions = re.findall(r"python_full_version (?:<|>=|==|!=) '[\d.]+'", marker)
    return " and ".join(version for version in versions if version != "python_full_version < '3.14'")


def hashes_of(package: dict[str, Any]) -> list[str]:
    """Returns the hashes of the wheels that fit Linux and the supported versions of Python."""
    return sorted(wheel["hashes"]["sha256"] for wheel in package["wheels"] if _fits(_file(wheel), PYTHONS, MACHINES))


def sizes_of(package: dict[str, Any]) -> tuple[int, int]:
    """Returns the bytes of the wheel for CPython 3.11 on x86-64, and those of the files in it."""
    wheels = [wheel for wheel in package["wheels"] if _fits(_file(wheel), PYTHONS[:1], MACHINES[:1])]
    wheel = max(wheels or package["wheels"], key=lambda wheel: "cp311-cp311" in wheel["url"])
    with zipfile.ZipFile(io.BufferedReader(Remote(wheel["url"], wheel["size"]), 2**18)) as archive:
        return wheel["size"], sum(file.file_size for file in archive.infolist())


def _file(wheel: dict[str, Any]) -> str:
    return wheel["url"].rpartition("/")[2].replace("%2B", "+")


def _fits(file: str, pythons: tuple[str, ...], machines: tuple[str, ...]) -> bool:
    exact = {f"cp{python.replace('.', '')}" for python in pythons}
    systems = re.compile(rf"any|(many)?linux.*_({'|'.join(machines)})")
    for tag in parse_wheel_filename(file)[3]:
        stable = tag.abi == "abi3" and int(tag.interpreter[3:] or 0) <= max(int(python[2:]) for python in pythons)
        plain = tag.abi == "none" and (tag.interpreter.startswith("py3") or tag.interpreter in exact)
        if systems.fullmatch(tag.platform) and (stable or plain or {tag.interpreter, tag.abi} <= exact):
            return True
    return False


class Remote(io.RawIOBase):
    """A file on a web server, of which no more is loaded than is read."""

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._at = url, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        request = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def entries_of(locked: list[Entry], upgrade: bool) -> list[Entry]:
    """Returns what the lock is to hold, in the order of names."""
    _, extras, groups, build = declared(ROOT)
    names = {"base": ["pyproject.toml"]} | {extra: ["pyproject.toml", "--extra", extra] for extra in extras}
    names |= {group: ["--group", group] for group in groups}
    packages: dict[tuple[str, str, str], dict[str, Any]] = {}
    tags: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        pins = Path(directory) / "pins.txt"
        every = {"extras": ["pyproject.toml", "--all-extras"]} | {group: names[group] for group in groups}
        pinned(locked, pins, every, upgrade)
        for name, arguments in names.items():
            for package in resolved(pins, *arguments, stdin="\n".join(build) if name == "base" else ""):
                key = package["name"], package["version"], marker_of(package)
                if "base" not in tags[key] or name in groups:
                    tags[key].append(name)
                if name == "train" and CUDA.fullmatch(package["name"]):
                    tags[key].append(CUDA_BUILD)
                packages[key] = package
    known = {(entry.name, entry.version): (entry.download, entry.unpacked) for entry in locked}
    made = [
        Entry(name, version, marker, tuple(tags[key]), *sizes, tuple(hashes_of(package)))
        for key, package in packages.items()
        for name, version, marker in [key]
        for sizes in [known.get((name, version)) or sizes_of(package)]
    ]
    return sorted([*made, _cpu_build(locked, made)], key=lambda entry: (entry.name, entry.version, entry.marker))


def _cpu_build(locked: list[Entry], made: list[Entry]) -> Entry:
    [torch] = [entry for entry in made if entry.name == "torch"]
    tags = tuple(CPU_BUILD if tag == CUDA_BUILD else tag for tag in torch.tags)
    for entry in locked:
        if (entry.name, entry.version) == ("torch", f"{torch.version}+cpu"):
            return replace(entry, tags=tags)
    sys.exit(
        f"lock.txt has no entry torch=={torch.version}+cpu: write one with the hashes of its wheels for Linux at "
        f"{CPU_INDEX}/torch/, or bound torch in pyproject.toml."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true")
    lock = ROOT / "lock.txt"
    entries = entries_of(read_lock(lock) if lock.exists() else [], parser.parse_args().upgrade)
    lock.write_text(HEADER.format(fingerprint=fingerprint(ROOT)) + "".join(map(str, entries)), encoding="utf-8")


if __name__ == "__main__":
    main()
