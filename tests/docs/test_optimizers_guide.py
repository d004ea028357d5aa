"""docs/guide/optimizers.md says what the table of optimizers says."""

from __future__ import annotations

import re

from places import ROOT

from trainer.config.optim import OPTIMIZERS

GUIDE = (ROOT / "docs" / "guide" / "optimizers.md").read_text(encoding="utf-8")


def shown(value) -> str:
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def test_its_table_is_the_codes():
    rows = [
        [cell.strip() for cell in line.replace("\\*", "*").split("|")[1:-1]]
        for line in GUIDE.splitlines()
        if line[:2] == "| " and line.count("|") == 7
    ]
    found = {row[0]: row for row in rows if row[0] != "name"}
    assert list(found) == list(OPTIMIZERS), "docs/guide/optimizers.md: one row for each optimizer, in the table's order"
    for name, known in OPTIMIZERS.items():
        _, lr, search, decay, others, source = found[name]
        defaults = dict(known.defaults)
        assert lr == shown(defaults.pop("lr"))
        assert decay == shown(defaults.pop("weight_decay"))
        assert others == ", ".join(f"{field} {shown(value)}" for field, value in defaults.items())
        low, high = map(float, search.split(" to "))
        assert low < known.defaults["lr"] < high
        assert re.search(r"20\d\d", source)


def test_what_needs_whole_parameters_is_listed():
    [listed] = re.findall(r"- \*\*([a-z_, ]+)\*\* need whole parameters", GUIDE)
    needing = [name for name, known in OPTIMIZERS.items() if not known.sharded]
    assert listed.split(", ") == needing, "docs/guide/optimizers.md lists them below 'What to know of some of them'"
