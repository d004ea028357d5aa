"""What is shipped can be checked: an SBOM of lock.txt with hashes, licences, and signed checksums of a wheel."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name
from places import ROOT
from setup_env import read_lock

pytestmark = pytest.mark.usefixtures("process")

WHO = "release@hpo.example"
NAMES = ("base", "s3")


def make(target: str, directory: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    call = ["make", "--no-print-directory", "READY=", f"BIN={Path(sys.executable).parent}", f"DIST={directory}"]
    return subprocess.run([*call, *variables, target], cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.fixture
def key(tmp_path) -> Path:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("runs after `apt-get install openssh-client`")
    path = tmp_path / "release"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", WHO, "-f", path], check=True)
    (tmp_path / "signers").write_text(f"{WHO} {path.with_suffix('.pub').read_text()}")
    return path


def verified(directory: Path, signers: Path) -> bool:
    """Returns whether the signature is that of a signer and every checksum is right, as SECURITY.md has it."""
    check = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", WHO, "-n", "hpo", "-s", "SHA256SUMS.sig"]
    with open(directory / "SHA256SUMS") as sums:
        signed = subprocess.run(check, cwd=directory, stdin=sums, capture_output=True).returncode == 0
    sums_right = subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=directory, capture_output=True)
    return signed and sums_right.returncode == 0


def test_a_signature_holds_until_a_file_or_a_checksum_changes(tmp_path, key):
    dist = tmp_path / "dist"
    dist.mkdir()
    wheel = dist / "hpo-1-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    (dist / "sbom.json").write_text("{}")
    for _ in range(2):  # the second signing replaces the first
        done = make("sign", dist, f"KEY={key}")
        assert done.returncode == 0, done.stderr
        assert verified(dist, tmp_path / "signers")
    assert {line.split()[1] for line in (dist / "SHA256SUMS").read_text().splitlines()} == {wheel.name, "sbom.json"}
    wheel.write_bytes(b"other")
    assert not verified(dist, tmp_path / "signers")
    sums = subprocess.run(["sha256sum", wheel.name, "sbom.json"], cwd=dist, capture_output=True, text=True, check=True)
    (dist / "SHA256SUMS").write_text(sums.stdout)
    assert not verified(dist, tmp_path / "signers"), "right checksums that nobody has signed"


def test_without_a_key_or_a_wheel_nothing_is_signed(tmp_path):
    done = make("sign", tmp_path)
    assert done.returncode == 2 and "KEY= is not a file: give the private key" in done.stderr
    (tmp_path / "key").touch()
    done = make("sign", tmp_path, f"KEY={tmp_path / 'key'}")
    assert done.returncode == 2 and "has no wheel: make wheel builds one" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_the_sbom_has_the_versions_and_hashes_of_the_lock(tmp_path):
    pytest.importorskip("cyclonedx_py", reason="runs where make test has installed cyclonedx-bom")
    done = make("sbom", tmp_path, f"SHIPPED={' '.join(NAMES)}")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "sbom.json").read_text())
    assert document["bomFormat"] == "CycloneDX" and document["metadata"]["component"]["name"] == "hpo"
    entries = [entry for entry in read_lock(ROOT / "lock.txt") if entry.fits(NAMES, sys.version_info[:3])]
    components = {component["name"]: component for component in document["components"]}
    assert {name: component["version"] for name, component in components.items()} == {
        e.name: e.version for e in entries
    }
    for entry in entries:
        references = components[entry.name]["externalReferences"]
        hashes = {each["content"] for reference in references for each in reference.get("hashes", [])}
        assert hashes == {*entry.hashes}, entry.name


def test_the_licences_of_what_hpo_needs_are_known(tmp_path):
    pytest.importorskip("piplicenses", reason="runs where make test has installed pip-licenses")
    done = make("licences", tmp_path)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "licences.csv", newline="") as file:
        licences = {canonicalize_name(row["Name"]): row["License"] for row in csv.DictReader(file)}
    needed = [entry.name for entry in read_lock(ROOT / "lock.txt") if entry.fits(["base"], sys.version_info[:3])]
    assert {name for name in needed if licences.get(name, "UNKNOWN") == "UNKNOWN"} == set()


def test_no_private_key_lies_in_the_tree():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    marks = (
        b"-----BEGIN OPENSSH " + b"PRIVATE KEY",
        b"-----BEGIN " + b"PRIVATE KEY",
        b"-----BEGIN RSA " + b"PRIVATE KEY",
    )
    files = [ROOT / os.fsdecode(name) for name in listed if name]
    assert not [file.name for file in files if file.is_file() and any(mark in file.read_bytes() for mark in marks)]
