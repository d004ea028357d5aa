"""`hpo doctor`: each check with the fault really there, and what is said of a host where nothing is wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from crafted import open_crafted, put_trial
from places import ROOT
from typer.testing import CliRunner

from hpo.cli.main import app
from hpo.clock import SystemClock
from hpo.doctor import devices, disk, home, limits, packages
from hpo.doctor.finding import Finding
from hpo.ledger import Ledger, leases
from hpo.ledger.process_id import Process
from hpo.storage.home import Home

pytestmark = pytest.mark.usefixtures("process")  # torch is looked at


@pytest.fixture
def studied(home: Home) -> Home:
    ledger = open_crafted(home.create().root / "ledger.db")
    for number in range(40):
        put_trial(ledger, number, "complete", (0.1, 0.2))
    ledger.close()
    return home


def failing(*words: str) -> dict[str, str]:
    """Area -> text and fix of the last that would fail there; the exit code tells whether there is one."""
    said = CliRunner().invoke(app, ["doctor", "--json", *words])
    found = json.loads(said.stdout)
    bad = [one for one in found["findings"] if one["level"] == "fails"]
    assert (said.exit_code, found["fails"]) == (1 if bad else 0, len(bad)), said.output
    return {one["area"]: f"{one['text']} -> {one['fix']}" for one in bad}


def level(findings: Any) -> dict[str, Finding]:
    """The findings by their level."""
    return {one.level: one for one in findings}


def test_nothing_would_fail_and_nothing_is_made(home, studied):
    before = sorted(studied.root.iterdir())
    said = CliRunner().invoke(app, ["doctor", "--home", str(studied.root)])
    assert said.exit_code == 0 and said.stdout.endswith("nothing would fail.\n"), said.output
    for area in ("python", "packages", "extras", "devices", "disk", "limits", "home", "ledger", "tracking"):
        assert f"\n{area}\n" in f"\n{said.stdout}", area
    assert {path.suffix for path in set(studied.root.iterdir()) - {*before}} <= {".db-wal", ".db-shm"}
    nowhere = studied.root / "none"
    assert failing("--home", str(nowhere)) == {} and not nowhere.exists()


def test_a_ledger_that_is_damaged(studied):
    file = studied.root / "ledger.db"
    with file.open("r+b") as database:
        size = database.seek(0, 2)
        for page in range(6, size // 4096):  # the schema is left whole
            database.seek(page * 4096)
            database.write(b"\xff" * 64)
    assert "backup" in failing("--home", str(studied.root))["ledger"]
    file.write_bytes(b"no database" * 1000)
    assert "not a database" in failing("--home", str(studied.root))["ledger"]


def test_servers_that_are_away_and_no_password_is_shown(home):
    there = (
        "--storage",
        "postgresql+psycopg://me:hunter2@127.0.0.1:9/x",
        "--tracking-uri",
        "http://me:hunter2@127.0.0.1:9",
    )
    found = failing("--home", str(home.root), *there)
    assert {"ledger", "tracking"} == found.keys()
    assert "does not answer" in found["ledger"] and "does not answer" in found["tracking"]
    assert "hunter2" not in str(found)
    assert "ftp" in failing("--home", str(home.root), "--tracking-uri", "ftp://me:hunter2@h")["tracking"]


@pytest.mark.usefixtures("postgres_database")
def test_a_server_that_answers(home, postgres_database):
    url = postgres_database()
    Ledger(url).close()
    assert failing("--home", str(home.root), "--storage", url) == {}


def test_leases_of_the_dead_and_of_the_living(studied):
    with closing(Ledger(studied.storage)) as ledger:
        me = Process.current()
        dead = replace(me, pid=2**22 - 3, id="d" * 32)
        leases.acquire(ledger, "driver:1", "crafted", dead, SystemClock(), 60.0)
        leases.acquire(ledger, "mirror:1", "crafted", me, SystemClock(), 60.0)
    found = {one.level: one for one in home.ledger(studied, None)}
    assert "driver:1" in found["note"].text and "hpo resume" in found["note"].fix
    assert f"mirror:1 by {me.host}:{me.pid}" in found["ok"].text


FULL = """
mount -t tmpfs -o size=900k none small && mkdir small/home || exit 77
dd if=/dev/zero of=small/fill bs=1k count=2000 status=none 2>/dev/null
{doctor} --home small/home
mount --bind kept kept && mount -o remount,ro,bind kept || exit 77
{doctor} --home kept
ulimit -n 100
{doctor} --home elsewhere
"""


def test_a_full_disk_a_home_to_read_and_few_open_files(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "small").mkdir()
    doctor = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "hpo", "doctor", "--json"])
    line = ["unshare", "-Urm", "bash", "-c", FULL.format(doctor=doctor)]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    if ran.returncode in (1, 77) and not ran.stdout:
        pytest.skip(f"runs as root, or with the right to mount in a namespace of its own: {ran.stderr.strip()}")
    full, kept, few = (
        [one for one in json.loads(line)["findings"] if one["level"] == "fails"] for line in ran.stdout.splitlines()
    )
    assert {one["area"] for one in full} == {"disk"} and "0.00 MB of" in full[0]["text"], full
    assert {one["area"] for one in kept} == {"disk", "home"} and "cannot be written (Read-only" in kept[-1]["text"], (
        kept
    )
    assert [(one["area"], one["text"][:14]) for one in few] == [("limits", "100 open files")] and "ulimit -n" in few[0][
        "fix"
    ]


def test_a_home_on_a_network(home, monkeypatch):
    monkeypatch.setattr(disk, "filesystem_of", lambda path: "nfs4")
    assert "local disk" in level(disk.filesystem(home, None))["fails"].fix
    assert "fails" not in level(disk.filesystem(home, "postgresql+psycopg://h/x"))


def test_a_home_that_others_own_or_may_write(studied):
    studied.root.chmod(0o777)
    assert "chmod" in level(home.rights(studied))["note"].fix


def test_packages_that_are_missing_or_too_old():
    required = [
        "torch<1",
        "no-such-package>=3",
        "numpy>=2",
        'no-such-extra>=1; extra == "ui"',
        'pillow>=1; extra == "images"',
    ]
    found = [one.text for one in packages.installed(required) if one.level == "fails"]
    assert [text.split()[0] for text in found] == ["torch", "no-such-package"]
    extras = {one.text.split()[0]: one for one in packages.extras(required)}
    assert extras["ui"].fix == "pip install 'hpo[ui]'"
    assert extras["ui"].describe() == f"        ui           {packages.PURPOSES['ui']:<48} pip install 'hpo[ui]'"
    assert f"{packages.PURPOSES['images']:<48} pillow " in extras["images"].text and not extras["images"].fix


def test_each_extra_has_a_purpose_and_each_sentence_names_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert packages.PURPOSES.keys() == project["optional-dependencies"].keys()
    code = [path.read_text() for name in ("hpo", "trainer", "studies", "bench") for path in (ROOT / name).rglob("*.py")]
    named = {extra for text in code for extra in re.findall(r"pip install 'hpo\[(\w+)\]'", text)}
    assert {"train", "plots", "s3"} <= named <= packages.PURPOSES.keys()


def test_a_clone_that_is_not_installed(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    for name in ("version", "metadata", "requires"):
        monkeypatch.setattr(packages.metadata, name, absent)
    [found] = packages.interpreter()
    assert found.level == "fails" and "without an install" in found.text and found.fix.startswith("pip install -e ")
    assert not [*packages.extras()] and {one.level for one in packages.installed()} <= {"ok"}


def test_a_driver_that_torch_cannot_use(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("runs where torch uses no GPU of the host")
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    found = level(devices.accelerators(version))["fails"]
    assert "550.54.15" in found.text and "train.device=cpu" in found.fix


def test_the_bounds_of_a_container(tmp_path):
    for name, text in {"memory.max": "1000000000", "memory.current": "900000000", "cpu.max": "50000 100000"}.items():
        (tmp_path / name).write_text(text)
    memory, cpu = limits.container(tmp_path)
    assert (
        (memory.level, cpu.level) == ("fails", "note")
        and "0.5 cores" in cpu.text
        and "more --workers than 1" in cpu.fix
    )
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "cpu.max").write_text("max 100000")
    assert [*limits.container(tmp_path)] == [] == [*limits.container(Path("/nowhere"))]


def test_shared_memory_that_is_missing():
    assert level(limits.shared_memory(Path("/nowhere/shm")))["note"].fix


def test_a_storage_that_is_no_url_fails_in_a_sentence(tmp_path):
    said = CliRunner().invoke(app, ["doctor", "--storage", "/dev/null", "--home", str(tmp_path / "home")])
    assert said.exit_code == 1 and "'/dev/null' is not a database URL: use sqlite:///PATH or" in said.stdout
