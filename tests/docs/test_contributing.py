"""CONTRIBUTING.md: short, and what it and the hooks run is installed by the set-up that it gives."""

from __future__ import annotations

import re
import tomllib

import pytest

from hpo.declaration.code_digest import ROOT

# Commands that have another name than the package that brings them.
BROUGHT_BY = {"lint-imports": "import-linter", "python": None}


def test_contributing_fits_on_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", ".pre-commit-config.yaml"])
def test_what_is_run_from_the_environment_is_in_a_group(page):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    tools = {re.split(r"[^\w-]", tool)[0] for group in ("test", "lint") for tool in groups[group]}
    run = set(re.findall(r"\.venv/bin/([\w-]+)", (ROOT / page).read_text(encoding="utf-8")))
    assert run and {BROUGHT_BY.get(name, name) for name in run} <= tools | {None}


def test_hooks_are_local_so_that_they_run_the_pinned_tools():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"- repo: (\S+)", hooks) == ["local"]
