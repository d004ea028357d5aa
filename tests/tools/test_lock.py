"""lock.txt is current: it was written from today's pyproject.toml, and every requirement finds its version there."""

from __future__ import annotations

import re
from itertools import product

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT
from setup_env import CPU_BUILD, CUDA_BUILD, PYTHONS, SETS, declared, fingerprint, names_of, read_lock, size

LOCK = read_lock(ROOT / "lock.txt")
DEPENDENCIES, EXTRAS, GROUPS, BUILD = declared(ROOT)
SUPPORTED = [(3, minor, 0) for minor in range(PYTHONS[0][1], PYTHONS[1][1] + 1)]


def test_the_lock_was_written_from_these_requirements():
    head = (ROOT / "lock.txt").read_text(encoding="utf-8").splitlines()[0]
    assert fingerprint(ROOT) in head, "pyproject.toml has other requirements than lock.txt: `make lock` writes it anew"


def test_nothing_of_the_lock_is_overlooked():
    text = (ROOT / "lock.txt").read_text(encoding="utf-8")
    assert "".join(map(str, LOCK)) == "".join(text.splitlines(keepends=True)[2:])
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for entry in LOCK for digest in entry.hashes)
    assert all(entry.hashes and entry.download > 0 and entry.unpacked > 0 for entry in LOCK)


@pytest.mark.parametrize("name", ["base", *EXTRAS, *GROUPS])
def test_each_requirement_is_locked_in_a_version_that_fits(name):
    base = {"base"} if name not in GROUPS else set()
    requirements = (DEPENDENCIES + BUILD if base else []) + EXTRAS.get(name, []) + GROUPS.get(name, [])
    for build, python in product((CPU_BUILD, CUDA_BUILD), SUPPORTED):
        entries = [entry for entry in LOCK if entry.fits({name, build} | base, python)]
        versions = {entry.name: entry.version for entry in entries}
        assert len(versions) == len(entries), "one version of each package"
        for requirement in map(Requirement, requirements):
            version = versions.get(canonicalize_name(requirement.name))
            assert version and requirement.specifier.contains(version, prereleases=True), str(requirement)


def test_each_build_of_pytorch_is_locked_and_needs_nothing_of_the_other():
    for build in (CPU_BUILD, CUDA_BUILD):
        entries = [entry for entry in LOCK if entry.fits({*SETS["run"], build}, (3, 11, 7))]
        [torch] = [entry for entry in entries if entry.name == "torch"]
        assert torch.version.endswith("+cpu") is (build == CPU_BUILD)
        assert any(entry.name.startswith("nvidia-") for entry in entries) is (build == CUDA_BUILD)
        assert len(torch.hashes) >= 2 * len(SUPPORTED), "x86-64 and aarch64, for each Python"


def test_the_sets_are_made_of_extras_and_groups():
    assert names_of(ROOT, [*SETS]) <= {"base", *EXTRAS, *GROUPS}
    assert {"lm", "test", "lint", "docs"} < SETS.keys() and {*SETS["run"]} < {*SETS["test"]}
    assert {*EXTRAS} - {*SETS["test"]} == {"gpu"}, "what a GPU alone needs"


def test_the_guide_says_what_the_lock_has():
    """The packages and sizes of the set `run`, with each build of PyTorch."""
    page = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    for build in (CPU_BUILD, CUDA_BUILD):
        entries = [entry for entry in LOCK if entry.fits({*SETS["run"], build}, (3, 11, 7))]
        sizes = (size(entry.download for entry in entries), size(entry.unpacked for entry in entries))
        assert f"| {len(entries)} | {sizes[0]} | {sizes[1]} |" in page, build


def test_pyproject_admits_the_supported_versions_of_python_alone():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    first, last = PYTHONS
    assert f'requires-python = ">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"' in text
