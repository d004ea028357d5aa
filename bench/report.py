"""What a report costs: to make, to hold and to look at in Debian's Chromium.

python bench/report.py [--trials 10 1000 10000]

make     processor time of reading the study from the ledger and of writing the page, and the page's size
paint    milliseconds from the navigation to the first contentful paint, by the browser's own clock
curves   milliseconds in which the figure of learning curves, of at most 500, is drawn
filter   milliseconds from a filter's input to the table that answers it, and to the figures in sight
memory   megabytes of the page's JavaScript heap after every figure was drawn
Each study is one of bench/many_trials.py: trials of up to 50 reports of two metrics.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from hpo.text import aligned

TIMES = 5
CURVES = """() => { const plot = Report.pages[0].plots.find(p => p.node.dataset.figure === 'curves');
  plot.stale = true; const begin = performance.now(); plot.refresh(true); return performance.now() - begin; }"""
FILTER = """() => new Promise(resolve => { const begin = performance.now();
  document.querySelector('[name=state]').click(); const table = performance.now() - begin;
  const look = () => Report.pages[0].plots.some(p => p.stale && p.seen) ? setTimeout(look)
    : resolve([table, performance.now() - begin]);
  look(); })"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def made(directory: Path, trials: int) -> tuple[Path, float]:
    """The page of a study of so many trials, and the processor time that it took."""
    from bench import many_trials
    from hpo.analysis.report import data, page
    from hpo.storage.home import Home

    home = Home.at(directory / f"home-{trials}")
    ledger = many_trials.write(home, trials)
    begin = time.process_time()
    file = page.write([data.read(ledger, home, "many")], directory / f"{trials}.html")
    took = time.process_time() - begin
    ledger.close()
    return file, took


def looked_at(browser: Any, file: Path) -> dict[str, float]:
    """Medians of TIMES looks at the page."""
    found: dict[str, list[float]] = {"paint": [], "curves": [], "table": [], "figures": [], "memory": []}
    for _ in range(TIMES):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        shown = context.new_page()
        shown.goto(file.as_uri())
        shown.wait_for_selector("html[data-ready]")
        found["paint"].append(shown.evaluate(PAINT))
        found["curves"].append(shown.evaluate(CURVES))
        shown.locator("[data-filter]").scroll_into_view_if_needed()
        shown.wait_for_timeout(1000)
        table_after, figures_after = shown.evaluate(FILTER)
        found["table"].append(table_after)
        found["figures"].append(figures_after)
        shown.evaluate("Report.redrawAll(true)")
        found["memory"].append(shown.evaluate("performance.memory.usedJSHeapSize") / 1e6)
        context.close()
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a report costs.")
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 1000, 10_000])
    given = parser.parse_args()
    import optuna  # noqa: F401  # its import is no cost of the report
    from playwright.sync_api import sync_playwright

    print(machine())
    rows: list[list[str]] = [["trials", "make, s", "size, MB", "paint", "curves", "table", "figures", "heap, MB"]]
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        flags = ["--no-sandbox", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for trials in given.trials:
            file, took = made(Path(directory), trials)
            seen = looked_at(browser, file)
            cells = [f"{took:.1f}", f"{file.stat().st_size / 1e6:.2f}", *(f"{seen[name]:.0f}" for name in seen)]
            rows.append([str(trials), *cells])
        browser.close()
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
