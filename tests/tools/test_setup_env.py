"""The set-up of `make`, run as it stands on small packages of its own: interrupted, gone on with, refused."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from places import ROOT
from setup_env import Entry, Environment, read_lock

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("process")]

FILES = 4000  # of the package `slow`, so that its installation can be interrupted
PYPROJECT = """
[build-system]
requires = ["flit_core"]
build-backend = "backend"
backend-path = ["."]

[project]
name = "hpo"
version = "0"

[project.optional-dependencies]
extra = ["last"]
"""
# Builds the editable project without setuptools, which no index of these tests has.
BACKEND = """
import zipfile

METADATA = "Metadata-Version: 2.1\\nName: hpo\\nVersion: 0\\n"
WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"


def build_editable(directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{directory}/hpo-0-py3-none-any.whl", "w") as wheel:
        for file, text in {"METADATA": METADATA, "WHEEL": WHEEL, "RECORD": ""}.items():
            wheel.writestr(f"hpo-0.dist-info/{file}", text)
    return "hpo-0-py3-none-any.whl"


def build_wheel(*arguments, **options):
    raise NotImplementedError
"""


def wheel(directory: Path, name: str, tags: str, files: int = 1) -> Entry:
    """Writes a wheel of empty modules and returns its entry in a lock."""
    path, inside = directory / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    texts = {f"{name}/m{number}.py": "" for number in range(files)} | {f"{name}/__init__.py": ""}
    texts |= {f"{inside}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"}
    texts |= {f"{inside}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    digest = {file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for file, text in texts.items()}
    lines = [f"{file},sha256={digest[file].decode().rstrip('=')},{len(text)}\n" for file, text in texts.items()]
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (texts | {f"{inside}/RECORD": "".join(lines) + f"{inside}/RECORD,,\n"}).items():
            archive.writestr(file, text)
    content = path.read_bytes()
    return Entry(name, "1", "", tuple(tags.split()), len(content), 10, (hashlib.sha256(content).hexdigest(),))


@pytest.fixture(scope="module")
def environment(tmp_path_factory, process) -> Path:
    """An environment with pip alone, to be copied: to make one takes seconds."""
    path = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", path], check=True)
    return path


@pytest.fixture
def clone(tmp_path, environment, monkeypatch) -> Path:
    """A clone with the Makefile and the set-up of this one, and a lock of three packages."""
    root, wheels = tmp_path / "clone", tmp_path / "wheels"
    shutil.copytree(environment, root / ".venv", symlinks=True)
    (root / "tools").mkdir(parents=True)
    wheels.mkdir()
    for file in ("Makefile", "tools/setup_env.py"):
        shutil.copy(ROOT / file, root / file)
    entries = [wheel(wheels, "first", "base"), wheel(wheels, "slow", "base", FILES), wheel(wheels, "last", "extra")]
    (root / "lock.txt").write_text("# A lock.\n" + "".join(map(str, entries)))
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without uv
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return root


def setting_up(clone: Path, *arguments: str) -> subprocess.Popen[str]:
    call = ["make", f"PYTHON={sys.executable}", "hpo-setup", "EXTRAS=", *arguments]
    return subprocess.Popen(
        call, cwd=clone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def output_of(process: subprocess.Popen[str], status: int = 0) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == status, output
    return output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_set_up_goes_on(clone, number):
    """Killed while the files of a package are written, it does not count as done, and the next one completes it."""
    process = setting_up(clone)
    packages = clone / ".venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    while not (packages / "slow" / "m0.py").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    os.killpg(process.pid, number)
    process.communicate()
    assert len([*(packages / "slow").iterdir()]) < FILES and not (clone / ".venv" / ".set-run").exists()
    output = output_of(setting_up(clone))
    assert "Installing 1 of 2 packages: " in output or "Installing 2 packages: " in output
    assert len([*(packages / "slow").iterdir()]) == FILES + 1 and (clone / ".venv" / ".set-run").exists()
    assert Environment.at(clone / ".venv").installed().items() >= {"first": "1", "slow": "1", "hpo": "0"}.items()
    assert "Installing" not in output_of(setting_up(clone)), "nothing is left to do"


def test_a_set_adds_what_is_missing_and_a_changed_lock_is_followed(clone):
    shutil.rmtree(clone / ".venv")
    assert "Installing 2 packages: 1 MB to download, 0 MB on the disk." in output_of(setting_up(clone))
    assert "Installing 1 of 3 packages" in output_of(setting_up(clone, "EXTRAS=extra"))
    wheels = Path(os.environ["PIP_FIND_LINKS"])
    lock = clone / "lock.txt"
    lock.write_text(lock.read_text() + str(wheel(wheels, "new", "base")))
    os.utime(lock, (time.time() + 5,) * 2)
    assert "Installing 1 of 3 packages" in output_of(setting_up(clone))
    assert (clone / ".venv" / ".set-run").stat().st_mtime > (clone / ".venv" / ".set-extra").stat().st_mtime


def test_a_package_with_another_hash_is_refused(clone):
    [wheels] = [Path(os.environ["PIP_FIND_LINKS"])]
    wheel(wheels, "slow", "base", 3)
    output = output_of(setting_up(clone), 2)
    assert "DO NOT MATCH THE HASHES" in output and "goes on with what is missing" in output
    assert not (clone / ".venv" / ".set-run").exists()


def test_an_unknown_extra_is_named(clone):
    output = output_of(setting_up(clone, "EXTRAS=extr"), 2)
    assert "'extr' is neither a set (run, lm, test, lint, docs, lock, supply) nor an extra (extra)." in output


def shim(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


def test_the_newest_python_that_runs_is_taken(clone, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    shim(tmp_path / "bin", "python3.13", "echo 'python3.13: command not found' >&2; exit 127")  # as pyenv's are
    shim(tmp_path / "bin", "python3.12", f'exec {sys.executable} "$@"')
    shim(tmp_path / "bin", "python3.11", "echo 3.11 was taken >&2; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    shutil.move(clone / ".venv", tmp_path / "kept")
    dry = ["make", "--dry-run", "hpo-setup"]

    def chosen() -> str:
        return subprocess.run(dry, cwd=clone, capture_output=True, text=True, check=True).stdout.split()[0]

    assert chosen() == "python3.12"
    shutil.move(tmp_path / "kept", clone / ".venv")
    assert chosen() == ".venv/bin/python", "what is there is kept"


def test_without_a_python_that_runs_make_says_so(clone, tmp_path, monkeypatch):
    shutil.rmtree(clone / ".venv")
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        shim(tmp_path / "bin", name, "exit 127")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    done = subprocess.run(["make", "hpo-setup"], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 2 and "hpo needs Python 3.11, 3.12 or 3.13, and none of them runs here" in done.stderr


def test_an_environment_whose_python_is_gone_is_made_anew(clone, tmp_path, capsys):
    path = clone / ".venv"
    (path / "bin" / "python").unlink()
    (path / "bin" / "python").symlink_to(tmp_path / "removed")
    assert Environment.at(path) is None
    assert Environment.ready(path).python == sys.version_info[:3]
    assert capsys.readouterr().out.startswith(f"Making {path} with Python {sys.version_info[0]}.")


def test_a_lock_is_read_as_it_is_written(tmp_path):
    entries = [
        Entry("a-b", "1.2+cpu", "", ("base", "torch-cpu"), 12, 34, ("0" * 64, "1" * 64)),
        Entry(
            "a-b",
            "1!2.0rc1",
            "python_full_version < '3.11.5' and python_full_version >= '3.11'",
            ("x",),
            1,
            2,
            ("2" * 64,),
        ),
    ]
    (tmp_path / "lock.txt").write_text("# A head.\n" + "".join(map(str, entries)))
    assert read_lock(tmp_path / "lock.txt") == entries
    assert entries[0].fits({"base", "torch-cpu"}, (3, 13, 0)) and not entries[0].fits({"base"}, (3, 13, 0))
    for python, fits in (((3, 11, 0), True), ((3, 11, 4), True), ((3, 11, 5), False), ((3, 12, 0), False)):
        assert entries[1].fits({"x"}, python) is fits
