"""What `--alert` takes, and the one sentence that it answers with to what it does not take."""

from __future__ import annotations

import re

import pytest
from places import ROOT
from rounds import rounds

from hpo.alerts import rules
from hpo.errors import UserError


def test_a_rule_is_a_target_and_events():
    rule = rules.parse("slack:@/run/secrets/slack")
    assert (rule.target, rule.kind, tuple(rule.on)) == ("slack:@/run/secrets/slack", "slack", rules.BY_DEFAULT)
    rule = rules.parse("command:echo turned on on best, target=-1e-3,no_progress=90m,disk=85%")
    assert rule.target == "command:echo turned on"
    assert rule.on == {"best": 0.0, "target": -0.001, "no_progress": 5400.0, "disk": 0.85}
    assert rules.parse("mail:a@b.org,c@d.org on disk,no_progress").on == {"disk": 0.9, "no_progress": 3600.0}
    assert set(rules.BY_DEFAULT) < set(rules.EVENTS)


@rounds(
    ("text", "why"),
    [
        ("", "it begins with none of webhook:, slack:, discord:, apprise:, mail:, command:"),
        ("slak:@/x", "it begins with none of"),
        ("slack:https://hooks.slack.com/services/T0/B0/hunter2", "is not stored: put it into a file"),
        ("webhook:http://me:hunter2@host/x", "it holds a secret"),
        ("discord:@", "put it into a file and give discord:@FILE"),
        ("webhook:env:", "give webhook:env:NAME"),
        ("mail:", "give the addresses, as mail:me@example.org"),
        ("mail:me", "give the addresses"),
        ("mail:a@b\nBcc: x@y", "give the addresses"),
        ("command:", "it names no program"),
        ("command:no-such-program-anywhere", "program 'no-such-program-anywhere' was not found"),
        ("command:echo 'open", "No closing quotation"),
        ("command:curl https://x/?token=hunter2", "it holds a secret"),
        (f"command:echo {'x' * 250}", "the ledger keeps 250"),
        ("mail:a@b.org on ned", "'ned' is not an event: give some of end, failure"),
        ("mail:a@b.org on end,", "'' is not an event"),
        ("mail:a@b.org on target", "target needs the value to be reached: give target=0.1"),
        ("mail:a@b.org on target=nan", "target=nan cannot be used: give a number"),
        ("mail:a@b.org on target=low", "target=low cannot be used"),
        ("mail:a@b.org on disk=120%", "disk=120% cannot be used: give a share such as 90%"),
        ("mail:a@b.org on no_progress=soon", "no_progress=soon cannot be used: give a time such as 30m"),
        ("mail:a@b.org on end=1", "end takes no value"),
    ],
)
def test_what_is_no_rule_is_one_sentence_without_secrets(text, why):
    with pytest.raises(UserError) as caught:
        rules.parse(text)
    assert why in str(caught.value) and "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


def test_the_guide_lists_every_event_and_what_is_told_by_default():
    page = (ROOT / "docs" / "guide" / "alerts.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:=[^`]*)?` \| .* \| ?(yes|) ?\|$", page, re.MULTILINE)
    assert dict(rows) == {name: "yes" if name in rules.BY_DEFAULT else "" for name in rules.EVENTS}


def test_rules_that_do_not_fit_together_or_the_study():
    with pytest.raises(UserError, match=r"'mail:a@b\.org' is given twice"):
        rules.parse_all(["mail:a@b.org on end", "mail:a@b.org on best"])
    with pytest.raises(UserError, match="a study of several objectives has no one value"):
        rules.check(rules.parse_all(["mail:a@b.org on target=1"]), {"objectives": [{}, {}]})
