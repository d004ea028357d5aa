"""Writes the pictures of the README and the guide, of studies just run: the live table, the head of a report and one of
its figures, the live page of a study that runs, and MLflow's pages.

    python docs/make_pictures.py

It needs Chromium. Look at the pictures before they are committed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).with_name("pictures")
STUDY = (
    "--study",
    "mlp",
    "--trials",
    "30",
    "--executor",
    "inline",
    "-o",
    "train.num_epochs=12",
    "-o",
    "data.test=true",
)
WIDTH, HEIGHT = 1280, 860


def main() -> None:
    """Run the study in a home that goes again, and take the pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        for command in (("run", *STUDY), ("report", "--to", f"{home}/report.html", "mlp")):
            subprocess.run([sys.executable, "-m", "hpo", *command, "--home", f"{home}/.hpo"], check=True)
        table(Path(home, ".hpo"), PICTURES / "table.svg")
        report(Path(home, "report.html"))
        live_page(Path(home, ".hpo"))
        mlflow(Path(home, ".mlflow"))


def mlflow(home: Path) -> None:
    """MLflow's pages, as somebody clicks through them."""
    import mlflow_tour

    mlflow_tour.prepared(home)
    mlflow_tour.walk(home, 5130, "mlp", "mlp-0001", PICTURES)


def table(home: Path, to: Path) -> None:
    """The live table, as a terminal of 100 columns shows it."""
    from rich.console import Console

    from hpo.display.live import View
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

    ledger = Ledger(Home.at(home).storage, create=False)
    with open("/dev/null", "w", encoding="utf-8") as nothing:
        console = Console(record=True, width=100, height=18, force_terminal=True, file=nothing)
        view = View(ledger, "mlp", console, workers=1)
        view.progress.refresh()
        console.print(view.picture())
        console.save_svg(str(to), title="hpo run --study mlp --trials 30")
    ledger.close()


def report(page: Path) -> None:
    """Takes pictures of the head of the report, down to the best configuration, and of its learning curves."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        tab.goto(page.as_uri())
        figure = tab.locator("[data-figure=curves]")
        figure.locator(".main-svg").first.wait_for()
        tab.wait_for_timeout(1000)
        head = tab.locator("[data-part=answer] table").first.bounding_box()
        assert head is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": head["y"] + head["height"] + 22}
        tab.screenshot(path=PICTURES / "report.png", clip=clip)
        figure.screenshot(path=PICTURES / "curves.png")
        browser.close()


def live_page(home: Path) -> None:
    """The table of trials of a study that runs, sorted by its newest trials, and its learning curves."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "hpo"]
    longer = ["-o", "train.num_epochs=20", "--trials", "40", "--name", "running", "--workers", "1"]
    run = [*command, "run", "--study", "mlp", *longer, "--executor", "local", "--home", str(home)]
    serve = [*command, "serve", "--home", str(home), "--port", "5081"]
    with (
        subprocess.Popen(run, stdout=subprocess.DEVNULL) as study,
        subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        address = server.stdout.readline().split()[-4]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        tab = browser.new_page(viewport={"width": 1100, "height": 1000})
        tab.goto(address)
        tab.locator("main a", has_text="running").first.click(timeout=120_000)
        tab.locator("[data-table] tbody tr").nth(7).wait_for(timeout=300_000)
        figure = tab.locator("[data-figure=curves]")
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
        tab.locator("[data-filter]").scroll_into_view_if_needed()
        tab.evaluate("document.querySelector('[aria-label=Trials]').scrollIntoView()")
        tab.wait_for_timeout(1500)
        tab.screenshot(path=PICTURES / "serve.png", clip={"x": 0, "y": 0, "width": 1100, "height": 620})
        browser.close()
        server.terminate()
        study.terminate()


if __name__ == "__main__":
    main()
