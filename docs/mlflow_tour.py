"""Clicks through MLflow's pages of a study as a person does, and takes the pictures of docs/guide/mlflow.md on the way.

`docs/make_pictures.py` and the test of the pages use it. It needs Chromium and a study with a promoted trial.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 1280, 720
TAKEN = ("trials", "stopped", "study", "compare", "model")
STUDY = ("--study", "mlp", "--trials", "16", "--executor", "inline", "-o", "train.num_epochs=12")


def prepared(home: Path) -> None:
    """A study that was run, and its best trial promoted."""
    for command in (("run", *STUDY), ("promote", "--study", "mlp")):
        subprocess.run([sys.executable, "-m", "hpo", *command, "--home", str(home)], check=True)


def walk(home: Path, port: int, study: str, stopped: str, pictures: Path) -> dict[str, Any]:
    """Find the best trial, see why `stopped` was, look at the study's curves, compare two, open the promoted model;
    what each page has said, by the name of its picture."""
    with served(home, port) as address, opened(address) as tab:
        tour = Tour(tab, pictures)
        seen: dict[str, Any] = {"trials": tour.trials()}
        seen["best"] = tour.run(seen["trials"][0])
        tour.back()
        seen["stopped"] = tour.run(stopped, "stopped")
        seen["study"] = tour.metrics(study)
        tab.goto(address)
        tour.trials()
        seen["compare"] = tour.compare()
        seen["model"] = tour.model(study)
    return seen


@contextmanager
def served(home: Path, port: int) -> Iterator[str]:
    """`hpo ui` over a home; the address that it prints of the study's trials."""
    command = [sys.executable, "-m", "hpo", "ui", "--home", str(home), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := re.search(r"best first: (\S+)", line):
                    yield found[1]
                    return
            raise RuntimeError("hpo ui has ended before it named a page")
        finally:
            server.terminate()


@contextmanager
def opened(address: str) -> Iterator[Any]:
    """A tab of Chromium at an address."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.set_default_timeout(120_000)
        tab.goto(address)
        yield tab
        browser.close()


class Tour:
    """What a person does with the pages; each stop returns the text of the page it has come to."""

    def __init__(self, tab: Any, pictures: Path) -> None:
        self._tab, self._pictures = tab, pictures

    def trials(self) -> list[str]:
        """The names of the trials in the table, as they are ordered."""
        self._tab.locator("[role=row] a[href*='/runs/']").first.wait_for()
        self._take("trials")
        return self._tab.locator("[role=row] a[href*='/runs/']").all_inner_texts()

    def run(self, name: str, picture: str = "") -> str:
        """Click on a trial in the table; the page of its run."""
        self._tab.get_by_role("link", name=name, exact=True).first.click()
        self._tab.get_by_text("About this run").wait_for()
        self._tab.get_by_text("Description", exact=True).first.scroll_into_view_if_needed()
        return self._text(picture)

    def back(self) -> None:
        """To the table."""
        self._tab.go_back()
        self._tab.locator("[role=row] a[href*='/runs/']").first.wait_for()

    def compare(self, count: int = 2) -> str:
        """Tick the first trials and compare them."""
        for row in range(count):
            self._tab.locator(f"[row-index='{row}'] input[type=checkbox]").first.check()
        self._tab.get_by_role("button", name="Compare", exact=True).click()
        self._tab.get_by_text(f"Comparing {count} Runs").wait_for()
        return self._text("compare")

    def metrics(self, study: str) -> str:
        """From a trial to its study's run, and the curves there."""
        self._tab.locator("a[href*='/runs/']", has_text=re.compile(f"^{re.escape(study)}$")).first.click()
        self._tab.get_by_text("Child runs").wait_for()
        self._tab.get_by_role("tab", name="Model metrics").click()
        self._tab.get_by_text("best_so_far", exact=True).wait_for()
        return self._text("study")

    def model(self, name: str) -> str:
        """The registered model and the version that its alias stands for."""
        self._tab.get_by_role("link", name="Model registry").click()
        self._tab.get_by_role("button", name="Close").click()  # what MLflow announces on the first visit
        self._tab.locator("a[href*='/models/']", has_text=re.compile(f"^{re.escape(name)}$")).click()
        self._tab.get_by_role("link", name="Version 1").first.click()
        self._tab.get_by_text("Registered At").wait_for()
        return self._text("model")

    def _text(self, picture: str) -> str:
        if picture:
            self._take(picture)
        return self._tab.locator("body").inner_text()

    def _take(self, name: str) -> None:
        self._tab.wait_for_timeout(1500)  # until what was drawn stands still
        self._tab.screenshot(path=self._pictures / f"mlflow-{name}.png")
