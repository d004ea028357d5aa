"""The studies' pages say what is searched: every path with its tier, range and condition, as declared."""

import re
from typing import Any

import pytest
from places import ROOT

import hpo
from hpo import Choice, Float, Int

ROW = re.compile(r"^\| (\d) \| `([a-z_.0-9]+)` \| ([^|;:]+)([^|]*) \|$", re.MULTILINE)
CONDITION = re.compile(r"where `([a-z_.]+)` is ([a-z_0-9, ]+)")


def declared(dimension: Any) -> tuple:
    match dimension:
        case Float(step=None):
            return dimension.low, dimension.high, dimension.log
        case Int(powers_of_two=True):
            return tuple(str(2**k) for k in range(20) if dimension.low <= 2**k <= dimension.high)
        case Int(step=1, multiple_of=None):
            return dimension.low, dimension.high, dimension.log
        case Choice():
            return tuple(map(str, dimension.options))
    raise AssertionError(f"write down how a page shows {dimension}")


def written(text: str) -> tuple:
    if ends := re.fullmatch(r"([\d.e-]+) to ([\d.e-]+)(, log)?", text):
        return float(ends[1]), float(ends[2]), bool(ends[3])
    return tuple(text.split(", "))


@pytest.mark.parametrize("name", ["atft", "bert", "convnet", "dpo", "gpt", "lora", "mlp", "online", "t5"])
def test_the_page_lists_what_is_searched(name):
    page = (ROOT / "studies" / name / "README.md").read_text()
    rows = ROW.findall(page)
    found = {
        path: (int(tier), written(text), {p: tuple(v.split(", ")) for p, v in CONDITION.findall(more)})
        for tier, path, text, more in rows
    }
    space = hpo.load(name).space.dimensions
    conditions = {path: {p: tuple(map(str, v)) for p, v in one.conditions.items()} for path, one in space.items()}
    assert found == {path: (one.tier, declared(one), conditions[path]) for path, one in space.items()}
    assert len(rows) == len(found) and [tier for tier, *_ in rows] == sorted(tier for tier, *_ in rows)
