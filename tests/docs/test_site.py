"""The site builds without a warning; the commands that pages show exist, and their Python runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import typer.main
from places import ROOT
from typer._click import Context

import hpo
from hpo.cli.main import app

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "docs/guide/*.md", "docs/reference/*.md", "studies/*/*.md", "docker/*.md")
    for page in ROOT.glob(pattern)
    if page.name not in ("CHANGELOG.md", "log.md", "log-details.md")  # what was, under the names that it had
)
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|&& |; )(?:\$ )?(?:\.venv/bin/)?hpo ((?!--)[a-z-]+)([^\n;|&#>]*)", re.MULTILINE)
GROUP = typer.main.get_command(app)
GROUPS = ("import",)  # commands that have commands
# The blocks of a page run one after another; before them runs what a page takes for granted.
RUN_HERE = {
    "data.md": "",
    "lanes.md": "from trainer.task import Loss, Task",
    "losses.md": "",
    "optimizers.md": "from hpo import Choice, Float",
    "schedules.md": "from hpo import Choice, Float",
}
RUN_BY = {  # or begin with `...`, and so are fragments
    "README.md": "tests/docs/test_doors.py",
    "alerts.md": "tests/docs/test_doors.py",
    "command.md": "tests/docs/test_command.py",
    "extend.md": "tests/docs/test_extend.py",
    "first-study.md": "tests/studies/mlp/test_quickstart.py",
    "from-a-script.md": "tests/docs/test_from_a_script.py",
    "function.md": "tests/docs/test_doors.py",
    "home.md": "",
    "import-export.md": "tests/docs/test_doors.py",
    "integrations.md": "tests/docs/test_integrations.py",
    "mlflow.md": "tests/hpo/analysis/models/test_promote.py",
    "models.md": "tests/hpo/analysis/models/test_language_exports.py",
    "objectives.md": "",
    "own-loop.md": "tests/docs/test_own_loop.py",
    "python.md": "tests/docs/test_doors.py",
    "ray-tune.md": "tests/hpo/ray_tune",
    "report.md": "tests/docs/test_doors.py",
    "rules.md": "",
}


def code_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return "\n".join([code for _, code in FENCE.findall(text)] + [span.replace("\n", " ") for span in spans])


def _command(outer: Any, name: str, rest: str) -> Any:
    """The command of that name, of a group that which `rest` begins with."""
    command = GROUP.get_command(outer, name)
    return command.get_command(outer, rest.split()[0].rstrip("\\")) if name in GROUPS and rest.split() else command


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


class Addresses(HTMLParser):
    """Collects what a page loads by itself, from another host too."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        loads = values.get("src") if tag in ("script", "img", "iframe") else None
        if tag == "link" and values.get("rel") in ("stylesheet", "preload", "preconnect"):
            loads = values.get("href")
        self.loaded += [loads] if loads else []


@pytest.mark.whole
@pytest.mark.usefixtures("process")
def test_the_site_builds_without_a_warning(tmp_path):
    """mkdocs checks links and anchors; strict makes an error of each warning."""
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert (built.returncode, built.stderr.strip()) == (0, "")
    addresses = Addresses()
    for page in (tmp_path / "site").rglob("*.html"):
        addresses.feed(page.read_text(encoding="utf-8"))
    assert [address for address in addresses.loaded if urlparse(address).netloc] == []
    commands = (tmp_path / "site" / "commands.html").read_text(encoding="utf-8")
    assert all(f'id="hpo-{name}"' in commands for name in GROUP.list_commands(Context(GROUP)))
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert all(f'.{name}"' in reference for name in hpo._EXPORTS)


def test_each_command_and_option_that_a_page_shows_exists():
    wrong = []
    with Context(GROUP, info_name="hpo") as outer:
        for page in PAGES:
            for name, rest in COMMAND.findall(code_of(page)):
                command = _command(outer, name, rest)
                options = {word for p in command.params for word in (*p.opts, *p.secondary_opts)} if command else set()
                used = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", rest)
                unknown = [option for option in used if option not in {*options, "--help"}]
                if command is None or unknown:
                    wrong.append((page.name, f"hpo {name}{rest}", unknown))
    assert wrong == []


def test_lines_that_can_be_typed_are_understood():
    """Values too: a sampler that is not there, a duration that cannot be read."""
    typed = [
        (page.name, line.split("#")[0].strip().removeprefix("$ "))
        for page in PAGES
        for kind, code in FENCE.findall(page.read_text(encoding="utf-8"))
        if kind in ("", "bash", "sh")
        for line in code.splitlines()
        if re.match(r"(\$ )?hpo [a-z]", line) and not re.search(r"[|\\…<>\[]|\.\.\.|[A-Z]{4}|&&", line.split("#")[0])
    ]
    assert len(typed) > 15
    with Context(GROUP, info_name="hpo") as outer:
        for page, line in typed:
            name, *arguments = shlex.split(line)[1:]
            if name in GROUPS:
                name, *arguments = f"{name} {arguments[0]}", *arguments[1:]
            command = _command(outer, *name.partition(" ")[::2])
            assert command is not None, (page, line)
            command.make_context(name, arguments, parent=outer)


def test_the_python_of_every_page_is_run_by_a_test():
    holding = {page.name for page in PAGES if blocks(page, "python")}
    assert holding == {*RUN_HERE, *RUN_BY}
    assert [test for test in RUN_BY.values() if not (ROOT / test).exists()] == []


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    shown = blocks(ROOT / "docs" / "guide" / page, "python")
    assert shown, "the page has nothing to run"
    for code in (RUN_HERE[page], *shown):
        exec(compile(code, page, "exec"), names)
    if "space" in names:  # of paths that a study has
        base = hpo.load("mlp")
        given = {"config": base.config, "task": base.task, "objectives": base.objectives}
        assert {*hpo.Study(name="page", space=names["space"], **given).space.paths} == names["space"].keys()
