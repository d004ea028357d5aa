"""Replaces e-mail addresses, phone numbers, IP addresses and keys by placeholders."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?)-----.*?-----END \1-----", re.DOTALL)
_KEYS = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # Amazon
    r"|gh[opsru]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{22,255}"
    r"|glpat-[A-Za-z0-9_-]{20,64}"  # GitLab
    r"|sk-[A-Za-z0-9_-]{20,200}"  # OpenAI, Anthropic
    r"|hf_[A-Za-z0-9]{30,64}"  # Hugging Face
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,250}"  # Slack
    r"|[prs]k_(?:live|test)_[0-9A-Za-z]{16,99}"  # Stripe
    r"|eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,1000}"  # JSON Web Tokens
    r")(?![A-Za-z0-9_-])"
)
_KEY_BEGINS = (
    *("AKIA", "ASIA", "gho_", "ghp_", "ghs_", "ghr_", "ghu_", "github_pat_", "glpat-", "sk-", "hf_", "AIza", "xox"),
    *("k_live_", "k_test_", "eyJ"),
)
_EMAIL = re.compile(
    r"(?<![\w.+%-])[A-Za-z0-9][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}[A-Za-z]{2,24}"
    r"(?![\w-])"
)
_IP4 = re.compile(rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?!\w|\.\d)")
_IP6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f:]{6,39}(?![\w:])")
# Numbers with a country code, of North America, and of countries that dial a 0 first.
_PHONE = re.compile(
    r"(?<![\w.+-])(?:"
    r"\+\d{1,3}(?:[ .-]?(?:\(\d{1,4}\)|\d{1,4})){2,6}"
    r"|(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}"
    r"|(?:\(0\d{1,4}\) ?|0\d{1,4}[ -])\d{1,4}[ -]\d{4}"
    r")(?![\w-]|\.\d)"
)
_DIGITS = range(8, 16)  # of a number with a country code, by E.164


def _is_ip6(text: str) -> bool:
    if text.count(":") < 2 or sum(map(bool, text.split(":"))) < 3:
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_phone(text: str) -> bool:
    return not text.startswith("+") or sum(map(str.isdigit, text)) in _DIGITS


def _may_have_key(text: str) -> bool:
    return any(map(text.__contains__, _KEY_BEGINS))


# (kind, a quick test that each text with a match passes, pattern, a check of the match), in the order of replacement.
# The tests begin with characters that the search can look for, unlike the patterns, which first look back.
_KINDS: tuple[tuple[str, Callable[[str], object], re.Pattern[str], Callable[[str], bool] | None], ...] = (
    ("private key", re.compile("PRIVATE KEY").search, _PRIVATE_KEY, None),
    ("key", _may_have_key, _KEYS, None),
    ("email", re.compile("@").search, _EMAIL, None),
    ("ip", re.compile(r"\d\.\d").search, _IP4, None),
    ("ip", re.compile(r"[0-9A-Fa-f]:[0-9A-Fa-f:]").search, _IP6, _is_ip6),
    ("phone", re.compile(r"\d[ .()-]{1,2}\d|\+\d").search, _PHONE, _is_phone),
)
PLACEHOLDERS = {"private key": "<private-key>", "key": "<key>", "email": "<email>", "ip": "<ip>", "phone": "<phone>"}


def replaced(text: str) -> tuple[str, Counter[str]]:
    """Returns the text with placeholders, and how many of each kind were replaced."""
    counts: Counter[str] = Counter()
    for kind, may_match, pattern, check in _KINDS:
        if not may_match(text):
            continue

        def placeholder(match: re.Match[str], kind: str = kind, check: Callable[[str], bool] | None = check) -> str:
            if check is not None and not check(match[0]):
                return match[0]
            counts[kind] += 1
            return PLACEHOLDERS[kind]

        text = pattern.sub(placeholder, text)
    return text, counts
