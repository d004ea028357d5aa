"""Each rule of the cleaner takes a document that breaks it and leaves one that barely does not; addresses; leaks."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from studies._lm.clean import leaks, personal, rules
from studies._lm.clean.rules import DOCUMENT_RULES, LINE_RULES, REPEATED_GRAMS, TOP_GRAMS, broken, cut_lines

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(count: int, start: int = 0) -> list[str]:
    """Distinct words of four letters."""
    numbers = range(start, start + count)
    return ["".join(LETTERS[number // 26**place % 26] for place in range(4)) for number in numbers]


def repeating(length: int, times: int, count: int) -> str:
    """`count` words of four letters, distinct but for a run of `length` that occurs so many times, apart."""
    run, rest = words(length, start=100_000), words(count - times * length)
    head = [word for filler in rest[:times] for word in (*run, filler)]
    return " ".join(head + rest[times:])


def parts(repeats: int, between: str) -> str:
    """Ten parts, of which so many are equal to the first."""
    return between.join([*words(10 - repeats), *words(1) * repeats])


def long_parts(size: int, between: str) -> str:
    """A part of so many characters twice, in 100."""
    rest = 100 - 2 * size
    return between.join(["x" * size, "x" * size, *("y" * 10 + LETTERS[i] * 10 for i in range(rest // 20))])


# rule -> (a document that breaks it, one that barely does not)
CASES = {
    "c4-lorem": ("So Lorem ipsum goes.", "So lorem, ipsum goes."),
    "c4-brackets": ("if (x) { y }", "if (x) ( y )"),
    "c4-sentences": ("It is. It was, v1.2 too!", "It is. It was. (Was it?)"),
    "gopher-words": (" ".join(words(49)), " ".join(words(50))),
    "gopher-word-length": (" ".join(["a" * 10] * 9 + ["a" * 11]), " ".join(["a" * 10] * 10)),
    "gopher-hashes": (" ".join(words(89) + ["#"] * 11), " ".join(words(90) + ["#"] * 10)),
    "gopher-ellipses": (" ".join(words(90) + ["so..."] * 5 + ["so\u2026"] * 6), " ".join(words(90) + ["so..."] * 10)),
    "gopher-bullets": ("- a\n\u2022 b\n" * 10, "- a\n" * 9 + "b"),
    "gopher-ellipsis-lines": ("a...\n" * 4 + "b\n" * 6, "a\u2026\n" * 3 + "b\n" * 7),
    "gopher-alphabetic": (" ".join(["a1"] * 79 + ["12"] * 21), " ".join(["a1"] * 80 + ["12"] * 20)),
    "gopher-stop-words": ("The the THE cat", "The cat of cats"),
    "gopher-lines": (parts(4, "\n"), parts(3, "\n")),
    "gopher-paragraphs": (parts(4, "\n\n"), parts(3, "\n \n")),
    "gopher-line-characters": (long_parts(21, "\n"), long_parts(20, "\n")),
    "gopher-paragraph-characters": (long_parts(21, "\n\n"), long_parts(20, "\n\n")),
}
for _length, _most in TOP_GRAMS.items():
    _times = int(_most * 1000) // _length
    CASES[f"gopher-top-{_length}"] = (repeating(_length, _times + 1, 1000), repeating(_length, _times, 1000))
for _length, _most in REPEATED_GRAMS.items():
    _times = int(_most * 1000) // _length
    CASES[f"gopher-repeated-{_length}"] = (repeating(_length, _times + 1, 1000), repeating(_length, _times, 1000))


@pytest.mark.parametrize("name", DOCUMENT_RULES)
def test_a_rule_takes_what_breaks_it_and_leaves_what_barely_does_not(name):
    breaks, barely_not = CASES[name]
    assert broken(breaks, [name]) == name
    assert broken(barely_not, [name]) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gopher-words", " ".join(["a"] * 100_001)),
        ("gopher-word-length", "ab abc abc"),
        ("c4-brackets", "a }"),
    ],
)
def test_rules_of_two_sides_take_the_other_side_too(name, text):
    assert broken(text, [name]) == name


@pytest.mark.parametrize(
    ("name", "breaks", "barely_not"),
    [
        ("c4-terminal", "It is so, they say", 'It is so, "they say" '),
        ("c4-line-words", "It is so now.", "It is so even now."),
        ("c4-javascript", "Turn on JavaScript to see this.", "Turn on Java Script to see this."),
        ("c4-policy", "This site uses Cookies, as sites do.", "This site bakes cookies, as sites do."),
    ],
)
def test_a_rule_of_lines_takes_the_line_alone(name, breaks, barely_not):
    assert set(LINE_RULES) == {"c4-terminal", "c4-line-words", "c4-javascript", "c4-policy"}
    text = f"{barely_not}\n\n{breaks}\n{barely_not}"
    assert cut_lines(text, [name]) == (f"{barely_not}\n\n{barely_not}", [(name, breaks)])


def plainly_top(text: list[str], length: int) -> float:
    grams = Counter(tuple(text[i : i + length]) for i in range(len(text) - length + 1))
    most = max(grams.values(), default=0)
    longest = max((len("".join(gram)) for gram, count in grams.items() if count == most), default=0)
    return most * longest / len("".join(text)) if most > 1 else 0.0


def plainly_repeated(text: list[str], length: int) -> float:
    grams = Counter(tuple(text[i : i + length]) for i in range(len(text) - length + 1))
    inside = {
        i + k for i in range(len(text) - length + 1) for k in range(length) if grams[(*text[i : i + length],)] > 1
    }
    return sum(len(text[i]) for i in inside) / len("".join(text))


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_runs_are_those_of_a_plain_count(seed):
    draw = random.Random(seed)
    text = [draw.choice(["a", "bb", "ccc", "dddd"]) for _ in range(draw.choice([1, 4, 9, 60]))]
    facts = rules.Facts(" ".join(text))
    for length in range(2, 11):
        assert facts.top(length) == pytest.approx(plainly_top(text, length))
        assert facts.repeated(length) == pytest.approx(plainly_repeated(text, length))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "ann.o-neil+x@mail.example.co.uk"),
        ("phone", "+49 30 901820-0"),
        ("phone", "(415) 555-0132"),
        ("phone", "03-1234-5678"),
        ("ip", "192.168.0.254"),
        ("ip", "2001:db8::8a2e:370:7334"),
        ("key", "AKIA" + "Q7" * 8),
        ("key", "ghp_" + "a1B2" * 9),
        ("key", "sk-proj-" + "a1B2" * 10),
        (
            "private key",
            "-----BEGIN RSA " + "PRIVATE KEY-----\nMIIB\nAg==\n-----END RSA PRIVATE KEY-----",
        ),
    ],
)
def test_an_address_is_replaced_wherever_it_stands(kind, text):
    mark = personal.PLACEHOLDERS[kind]
    for before, after in (("", ""), ("to ", " now"), ("(", ")"), ("at ", ".\nNext"), ("is:\n", ",")):
        assert personal.replaced(f"{before}{text}{after}") == (f"{before}{mark}{after}", {kind: 1})


@pytest.mark.parametrize(
    "text",
    [
        "on 2024-11-29 at 12:30:45",
        "it is 1,000,000.50 or 10 000 000",
        "version 1.2.3 and 300.1.2.3 of std::map",
        "@handle and a @ b",
        "the sk-learn package, ISBN 978-3-16-148410-0",
        "page 12-345, 0.1234-5678",
        "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    ],
)
def test_what_looks_like_an_address_stays(text):
    assert personal.replaced(text) == (text, {})


def index(tmp_path, *texts: str) -> np.ndarray:
    leaks.write_index(texts, tmp_path / "index")
    return leaks.read_index(tmp_path / "index")


def test_thirteen_words_are_a_leak_and_twelve_are_not(tmp_path):
    validation = words(40)
    runs = index(tmp_path, " ".join(validation))
    around = words(400, start=5000)
    assert leaks.cut(" ".join([*around, *validation[5:17], *around]), runs) is None
    text = " ".join([*around, *validation[5:18], *around])
    pieces = leaks.cut(text.replace(" ", ", ").upper(), runs)
    assert pieces is not None and len(pieces) == 2
    assert all(not set(validation) & set(piece.lower().split(", ")) for piece in pieces)
    plain = leaks.cut(text, runs) or []
    assert [len(piece) for piece in plain] == [2000 - leaks.WINDOW, 2000 - leaks.WINDOW]


def test_short_pieces_go_and_so_does_a_document_in_many(tmp_path):
    leak, runs = " ".join(words(13)), index(tmp_path, " ".join(words(13)))
    filler = " ".join(words(79, start=5000))  # 394 characters
    assert leaks.cut(f"{filler} {leak} {filler}", runs) == []
    half = f"{filler} {filler}"
    assert len(leaks.cut(f" {leak} ".join([half] * 10), runs) or []) == 10
    assert leaks.cut(f" {leak} ".join([half] * 11), runs) == []


def test_a_validation_text_without_thirteen_words_is_counted(tmp_path):
    assert leaks.write_index([" ".join(words(12)), " ".join(words(13))], tmp_path / "index") == 1
