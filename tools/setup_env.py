"""Installs into .venv what a target of the Makefile needs, as lock.txt has it: `python tools/setup_env.py run lm`.

It runs where nothing is installed yet, so it imports the standard library alone. uv installs where it is on the PATH,
else the pip of .venv. What is complete already stays, so an interrupted set-up goes on; the stamp of a set,
.venv/.set-NAME, is written after every package of it is complete.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHONS = (3, 11), (3, 13)  # the first and the last that lock.txt has wheels for
CPU_BUILD, CUDA_BUILD = "torch-cpu", "torch-cuda"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# What each set takes of the extras and groups of pyproject.toml; any other name is an extra, with hpo's dependencies.
RUN = ("base", "train", "ui", "plots", "text", "report", "serve")
EXTRAS = (
    "postgres",
    "clean",
    "images",
    "llm",
    "fp8",
    "onnx",
    "gguf",
    "datasets",
    "tfrecord",
    "ray",
    "s3",
    "lightning",
    "keras",
    "xgboost",
    "lightgbm",
    "apprise",
    "metrics",
)
TRACKERS = ("dashboard", "wandb", "tensorboard")
SETS = {
    "run": RUN,
    "lm": ("base", "train", "llm"),
    "test": (*RUN, *EXTRAS, *TRACKERS, "docs", "test", "supply"),
    "lint": (*RUN, *EXTRAS, *TRACKERS, "lint"),
    "docs": ("base", "docs"),
    "lock": ("lock",),
    "supply": (*RUN, "supply"),
}
_ENTRY = re.compile(
    r"^# (?P<download>\d+) (?P<unpacked>\d+) (?P<tags>.+)\n"
    r"(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)(?: ; (?P<marker>.+?))? \\\n(?P<hashes>(?:    --hash=.*\n)+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Entry:
    """A package of lock.txt: its version, the extras and groups that need it, its sizes and its wheels' hashes."""

    name: str
    version: str
    marker: str  # python_full_version compared with versions, joined by `and`; empty where it always holds
    tags: tuple[str, ...]
    download: int  # bytes
    unpacked: int  # bytes
    hashes: tuple[str, ...]

    def __str__(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        hashes = " \\\n".join(f"    --hash=sha256:{value}" for value in self.hashes)
        above = f"# {self.download} {self.unpacked} {' '.join(self.tags)}\n"
        return f"{above}{self.name}=={self.version}{marker} \\\n{hashes}\n"

    def fits(self, names: Iterable[str], python: tuple[int, ...]) -> bool:
        """Tells whether `names` need this package on this Python; a build of PyTorch must be named too."""
        needed, builds = {*names} & {*self.tags}, {CPU_BUILD, CUDA_BUILD} & {*self.tags}
        return bool(needed) and builds <= needed and all(_holds(part, python) for part in self.marker.split(" and "))


def _holds(comparison: str, python: tuple[int, ...]) -> bool:
    if not comparison:
        return True
    _, operator, version = comparison.split()
    wanted = tuple(map(int, version.strip("'").split(".")))
    order = (python > wanted) - (python < wanted)
    return {"<": order < 0, ">=": order >= 0, "==": order == 0, "!=": order != 0}[operator]


def read_lock(path: Path) -> list[Entry]:
    """Returns the packages of a lock, in its order."""
    return [
        Entry(
            match["name"],
            match["version"],
            match["marker"] or "",
            tuple(match["tags"].split()),
            int(match["download"]),
            int(match["unpacked"]),
            tuple(re.findall(r"sha256:(\w+)", match["hashes"])),
        )
        for match in _ENTRY.finditer(path.read_text(encoding="utf-8"))
    ]


def declared(root: Path) -> tuple[list[str], dict[str, list[str]], dict[str, list[str]], list[str]]:
    """Returns the requirements of pyproject.toml: hpo's own, by extra, by group, and those of its build."""
    import tomllib  # new in 3.11; an older Python gets to the sentence that refuses it

    document = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    extras, groups = project.get("optional-dependencies", {}), document.get("dependency-groups", {})
    return project.get("dependencies", []), extras, groups, document["build-system"]["requires"]


def fingerprint(root: Path) -> str:
    """Returns the SHA-256 of the requirements of pyproject.toml, which the head of lock.txt names."""
    return hashlib.sha256(json.dumps(declared(root), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and the command that installs into it."""

    path: Path
    python: tuple[int, ...]
    packages: Path  # its site-packages

    @classmethod
    def at(cls, path: Path) -> Environment | None:
        """Returns the environment at `path`, None where there is none or its Python does not run."""
        ask = "import sys, sysconfig; print(*sys.version_info[:3]); print(sysconfig.get_path('purelib'))"
        try:
            done = subprocess.run([path / "bin" / "python", "-c", ask], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        version, packages = done.stdout.splitlines()
        return cls(path, tuple(map(int, version.split())), Path(packages))

    @classmethod
    def ready(cls, path: Path) -> Environment:
        """Returns the environment at `path`, made anew with the Python that runs this where none runs there."""
        environment = cls.at(path)
        if environment is None:
            print(f"Making {path} with Python {_dotted(sys.version_info[:3])}.", flush=True)
            shutil.rmtree(path, ignore_errors=True)
            _call([sys.executable, "-m", "venv", str(path)])
            environment = cls.at(path)
        elif sys.version_info[:2] != environment.python[:2]:
            print(f"{path} keeps its Python {_dotted(environment.python)}. For another one, `make clean` first.")
        assert environment is not None, f"{path} has just been made"
        _refuse_other(environment.python, f"{path} has")
        return environment

    def installer(self, *arguments: str) -> list[str]:
        """Returns the command that installs what `arguments` name, without their dependencies."""
        python = str(self.path / "bin" / "python")
        if shutil.which("uv"):
            return ["uv", "pip", "install", "--python", python, "--no-deps", *arguments]
        if not (self.packages / "pip").is_dir():
            _call([python, "-m", "ensurepip", "--default-pip"])
        return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-compile", *arguments]

    def installed(self) -> dict[str, str]:
        """Returns the version of each package whose installation has ended.

        Installers write a package's RECORD last, with INSTALLER in it. A package that was interrupted before that loses
        its directory of metadata, so that it is installed anew.
        """
        versions = {}
        for directory in self.packages.glob("*.dist-info"):
            name, _, version = directory.name.removesuffix(".dist-info").rpartition("-")
            record = directory / "RECORD"
            if record.is_file() and f"{directory.name}/INSTALLER" in record.read_text(encoding="utf-8"):
                versions[re.sub(r"[-_.]+", "-", name).lower()] = version
            else:
                shutil.rmtree(directory)
        return versions

    def build_of_torch(self, version: str) -> str:
        """Returns the build of PyTorch that is installed, or, in another version, the one that would be installed."""
        present = self.installed().get("torch", "")
        if present.partition("+")[0] != version:
            python = str(self.path / "bin" / "python")
            ask = [python, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
            if shutil.which("uv"):
                ask = [*self.installer("--dry-run"), f"torch=={version}"]
            done = subprocess.run(ask, capture_output=True, text=True)
            present = f"{version}+cpu" if f"{version}+cpu" in done.stdout + done.stderr else version
        return CPU_BUILD if present.endswith("+cpu") else CUDA_BUILD

    def install(self, entries: list[Entry]) -> None:
        """Installs these packages. Ends the program with a sentence where one is not complete afterwards."""
        requirements = self.path / "set-up.txt"
        requirements.write_text("".join(map(str, entries)), encoding="utf-8")
        command = self.installer("--only-binary", ":all:", "--require-hashes", "--requirement", str(requirements))
        before, counted = len(self.installed()), 0
        process = subprocess.Popen(command)
        while (status := _waited(process)) is None:  # pip says nothing while it unpacks
            ended = sum(1 for _ in self.packages.glob("*.dist-info")) - before
            if ended > counted:
                print(f"{ended} of {len(entries)} packages are installed", flush=True)
                counted = ended
        if status:
            sys.exit(f"The installation ended with {status}. The same command goes on with what is missing.")
        present = self.installed()
        if missing := [entry.name for entry in entries if present.get(entry.name) != entry.version]:
            sys.exit(f"Not installed in the versions of lock.txt: {', '.join(missing)}. Try again after `make clean`.")

    def compile(self) -> None:
        """Compiles what is installed: tests turn the compiler's warnings into errors, and start many processes."""
        print("Compiling what is installed.", flush=True)
        python = str(self.path / "bin" / "python")
        subprocess.run([python, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", str(self.packages)])


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(5)
    except subprocess.TimeoutExpired:
        return None


def set_up(root: Path, sets: Sequence[str]) -> None:
    """Installs the sets into .venv, and hpo itself where one of them needs it."""
    entries, names = read_lock(root / "lock.txt"), names_of(root, sets)
    environment = Environment.ready(Path(".venv"))
    if torch := [entry.version for entry in entries if entry.name == "torch" and names & {*entry.tags}]:
        names |= {environment.build_of_torch(torch[0].partition("+")[0])}
    needed = [entry for entry in entries if entry.fits(names, environment.python)]
    present = environment.installed()
    if missing := [entry for entry in needed if present.get(entry.name) != entry.version]:
        _announce(" ".join(sets), missing, len(needed), environment)
        if CUDA_BUILD in names and not Path("/proc/driver/nvidia").exists():
            _advise()
        environment.install(missing)
    if "base" in names and _is_older(environment, root / "pyproject.toml"):
        _call(environment.installer("--quiet", "--no-build-isolation", "--editable", str(root)))
    if "test" in names:
        environment.compile()
    for name in sets:
        (environment.path / f".set-{name}").touch()
    if missing and "base" in names:
        print(
            f"{environment.path} is ready: `source {environment.path}/bin/activate` puts hpo on the PATH.", flush=True
        )


def names_of(root: Path, sets: Sequence[str]) -> set[str]:
    """Returns the extras and groups that the sets consist of."""
    _, extras, _, _ = declared(root)
    if unknown := [name for name in sets if name not in SETS and name not in extras]:
        sys.exit(f"{unknown[0]!r} is neither a set ({', '.join(SETS)}) nor an extra ({', '.join(extras)}).")
    return {part for name in sets for part in SETS.get(name, ("base", name))}


def _announce(sets: str, missing: list[Entry], needed: int, environment: Environment) -> None:
    tool, python = "uv" if shutil.which("uv") else "pip", _dotted(environment.python)
    count = f"{len(missing)} packages" if len(missing) == needed else f"{len(missing)} of {needed} packages"
    download, unpacked = (
        size(sizes) for sizes in zip(*((each.download, each.unpacked) for each in missing), strict=True)
    )
    print(f"Set-up of {environment.path} with {tool}, Python {python}, for: {sets}")
    print(f"Installing {count}: {download} to download, {unpacked} on the disk.", flush=True)


def _advise() -> None:
    variable = "UV_TORCH_BACKEND=cpu" if shutil.which("uv") else f"PIP_EXTRA_INDEX_URL={CPU_INDEX}"
    print(
        f"Most of it is for NVIDIA's GPUs, which this machine lacks: {variable} takes PyTorch's CPU build.", flush=True
    )


def _refuse_other(python: Sequence[int], subject: str) -> None:
    if sys.platform != "linux" or not PYTHONS[0] <= tuple(python[:2]) <= PYTHONS[1]:
        present = f"Python {_dotted(python)} on {sys.platform}"
        sys.exit(f"lock.txt is for Python {' to '.join(map(_dotted, PYTHONS))} on Linux, and {subject} {present}.")


def _is_older(environment: Environment, declaration: Path) -> bool:
    records = [*environment.packages.glob("hpo-*.dist-info/RECORD")]
    return not records or records[0].stat().st_mtime < declaration.stat().st_mtime


def _call(command: list[str]) -> None:
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}  # setuptools warns of each editable installation
    if status := subprocess.run(command, env=quiet).returncode:
        sys.exit(f"{' '.join(command)} ended with {status}.")


def size(values: Iterable[int]) -> str:
    """Returns the sum of bytes as people read it."""
    total = sum(values)
    return f"{total / 1e9:.1f} GB" if total >= 1e9 else f"{total / 1e6:.0f} MB"


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="SET", help=f"{', '.join(SETS)}, or an extra of pyproject.toml")
    parser.add_argument("--list", action="store_true", help="print what these extras and groups need, as requirements")
    arguments, root, python = parser.parse_args(), Path.cwd(), sys.version_info[:3]
    if arguments.list:
        index = [f"--index-url {CPU_INDEX}\n"] if CPU_BUILD in arguments.names else []
        entries = [entry for entry in read_lock(root / "lock.txt") if entry.fits(arguments.names, python)]
        print(*index, *entries, sep="", end="")
        return
    _refuse_other(python, "this is")
    with open(root / "lock.txt", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two targets of `make -j` do not install at once
        try:
            set_up(root, arguments.names)
        except KeyboardInterrupt:
            print("\nInterrupted. The same command goes on with what is missing.", file=sys.stderr)
            sys.exit(130)


if __name__ == "__main__":
    main()
