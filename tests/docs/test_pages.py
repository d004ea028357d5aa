"""Pages are short and plain: their lengths by kind, their semicolons, and the entries of the glossary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import WRITTEN
from places import ROOT
from prose import PHRASES

DOCS = ROOT / "docs"
SHORT = ("Start", "Tutorials", "How to", "Explanation")  # sections of the site whose pages are read from end to end
MOST_WORDS = 1500
MOST_SEMICOLONS = 8  # of 100 sentences
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_END = re.compile(r"[.!?:](?=[\"')*_]*(?:\s|$))")


def sections() -> dict[str, list[str]]:
    """Returns the pages of each section of the site's navigation, in mkdocs.yml."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    parts = re.split(r"^  - (.+):$", navigation, flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"- (\S+\.md)$", text, re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


def blocks(text: str) -> Iterator[str]:
    """Yields paragraphs, list items, headings and cells of tables, without code and without the targets of links."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", _FENCE.sub("\n\n", text)))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=[|#])", text):
        yield from block.split("|") if block.startswith("|") else [block]


def semicolons(text: str) -> tuple[int, int]:
    """Returns (semicolons, sentences). A block without a full stop is one sentence."""
    prose = [block for block in blocks(text) if re.search("[A-Za-z]", block)]
    return sum(block.count(";") for block in prose), sum(max(1, len(_END.findall(block))) for block in prose)


def test_every_page_of_the_site_is_of_a_kind():
    placed = {page for pages in sections().values() for page in pages}
    ours = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {page for page in ours if not page.startswith("decisions/0")} <= placed
    assert [*sections()] == [*SHORT[:3], "Explanation", "Reference", "Inside"]


@pytest.mark.parametrize("section", SHORT)
def test_pages_to_be_read_from_end_to_end_are_short(section):
    pages = [DOCS / page for page in sections()[section] if (DOCS / page).is_file()]
    assert {page.name: words(page) for page in pages if words(page) > MOST_WORDS} == {}


def test_the_readme_and_the_changelog_are_short():
    assert words(ROOT / "README.md") <= 900
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 4096


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_few_semicolons(page):
    used, sentences = semicolons(page.read_text(encoding="utf-8"))
    assert 100 * used <= MOST_SEMICOLONS * sentences, f"{used} semicolons in {sentences} sentences"


def test_pages_have_no_stock_phrase():
    pages = [page for page in WRITTEN if page.name != "CONTRIBUTING.md"]  # which lists them
    texts = {page.relative_to(ROOT).as_posix(): _FENCE.sub("", page.read_text(encoding="utf-8")) for page in pages}
    assert {page: PHRASES.findall(text) for page, text in texts.items() if PHRASES.search(text)} == {}


def test_semicolons_of_code_do_not_count_and_cells_are_sentences():
    assert semicolons("Plan; act. Then rest.\n\n`a; b`\n\n```\nc; d\n```\n") == (1, 3)
    assert semicolons("- Plan; act\n- Rest\n\n| a; b | c. D. |\n|---|---|\n") == (2, 5)


def test_the_glossary_is_short_sorted_and_linked():
    entries = re.findall(
        r"^\| ([a-z].*?) \| .+\. \|$", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(entries) <= 40 and entries == sorted(entries)
    for page in ("README.md", "docs/guide/README.md", "docs/guide/search.md"):
        assert "glossary.md" in (ROOT / page).read_text(encoding="utf-8"), page
