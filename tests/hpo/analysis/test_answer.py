"""After `hpo confirm` every command, page and tracker names the trial that other seeds put first."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pytest
from study_runs import hpo as command

import hpo
from hpo.alerts import events
from hpo.analysis.follow_up import derived_study
from hpo.analysis.report import data, page
from hpo.ledger import Ledger, answer, queries
from hpo.search.spread import Rival, Spread, seeds_needed, standing
from hpo.storage.home import Home
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.pages import NOTE
from hpo.verify import verify

LUCKY = '''
import hpo


@hpo.study(space={"x": hpo.Choice([0.1, 0.2, 0.3, 0.4])}, minimize="val/loss")
def lucky(trial):
    """The trials with x = 0.4 have their low value by the seed of the search alone."""
    luck = 0.35 if trial.params.x == 0.4 and trial.seed == 0 else 0.0
    trial.report(1, {"val/loss": trial.params.x - luck + trial.seed / 1000})
'''
MEANS = {0.1: 0.1015, 0.2: 0.2015, 0.3: 0.3015, 0.4: 0.4015}  # under the seeds 1 and 2


@pytest.fixture(scope="module")
def home(tmp_path_factory, process) -> Home:
    place = tmp_path_factory.mktemp("answer")
    (place / "lucky.py").write_text(LUCKY)
    flags = {"executor": "inline", "progress": False, "sampler": "grid", "strategy": "none"}
    hpo.run(place / "lucky.py", trials=4, home=place / "home", **flags)
    return Home.at(place / "home")


@pytest.fixture(scope="module")
def before(home) -> dict[str, object]:
    """What each place said before the confirmation."""
    return said(home)


@pytest.fixture(scope="module")
def steadiest(home, before) -> int:
    flags = "--top", "4", "--seeds", "2", "--executor", "inline", "--json"
    shown = command("confirm", "--study", "lucky", *flags, home=home)
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)["rows"][0]["trial"]


def said(home: Home) -> dict[str, object]:
    """The number of the best trial, by the place that names it."""
    handle, ledger = hpo.open("lucky", home=home.root), Ledger(home.storage)
    with ledger.read() as connection:
        study = queries.study_row(connection, "lucky")
        ended = events.end(connection, study, None)
    report = data.read(ledger, home, "lucky")
    ledger.close()
    return {
        "best": json.loads(command("best", "--study", "lucky", "--json", home=home).stdout)["number"],
        "status": json.loads(command("status", "--study", "lucky", "--json", home=home).stdout)["best"]["number"],
        "python": handle.best["number"],
        "report": report.answer["best"][0]["number"],
        "alert": int(ended.text.split("trial ")[1].split(",")[0]) if ended else None,
        "MLflow": int(note(home).split("trial ")[1].split(",")[0]),
    }


def note(home: Home) -> str:
    with closing(MlflowTracker(home.tracking_uri, home.artifacts)) as tracker:
        [run] = tracker.find("lucky", Ledger(home.storage).look(lambda c: queries.study_row(c, "lucky")).uid)
    return run.tags[NOTE]


def params(home: Home, number: int) -> float:
    return hpo.open("lucky", home=home.root).trial(number)["params"]["x"]


def test_the_search_itself_takes_the_lucky_trial(home, before):
    assert {params(home, number) for number in before.values()} == {0.4}


def test_every_place_names_the_trial_that_other_seeds_put_first(home, before, steadiest):
    assert params(home, steadiest) == 0.1
    assert said(home) == dict.fromkeys(before, steadiest)


def test_what_other_seeds_said_stands_beside_it(home, before, steadiest):
    again = "val/loss 0.1015 ± 0.0005 under 2 other seeds (study lucky-confirm)"
    instead = f"the search itself has trial {before['best']} first, val/loss 0.05"
    shown = command("best", "--study", "lucky", home=home).stdout
    assert again in shown and instead in shown
    assert again in command("status", "--study", "lucky", home=home).stdout
    assert f"{again}; {instead}" in note(home)
    html = page.file_page([data.read(Ledger(home.storage), home, "lucky")])
    text = " ".join(re.sub("<[^>]+>", "", html).split())
    assert "is the best of 4 trials under other seeds: val/loss 0.10150 ± 0.00050" in text
    facts = json.loads(command("best", "--study", "lucky", "--json", home=home).stdout)
    assert facts["seeds"]["means"] == {"val/loss": pytest.approx(MEANS[0.1])}
    assert facts["value"] == 0.1, "its own value, of the search, stays beside it"


def test_mlflow_has_it_without_a_difference(home, steadiest):
    found = verify(home, home.storage)
    assert not found.differences and not found.behind


def test_its_default_is_taken_by_the_commands_that_follow(home, steadiest):
    assert derived_study.found(Ledger(home.storage), "lucky").chosen(None)["number"] == steadiest


def test_the_search_ranks_as_before_for_what_goes_on(home, before, steadiest):
    ledger = Ledger(home.storage)
    with ledger.read() as connection:
        study = queries.study_row(connection, "lucky")
        [first] = answer.selected(connection, study)
        assert first.number == queries.ranked(connection, study)[0] == before["best"]


def test_a_confirmation_that_is_removed_decides_nothing(home, before, steadiest):
    removed = command("rm", "--study", "lucky-confirm", "--yes", home=home)
    assert removed.exit_code == 0, removed.output
    assert json.loads(command("best", "--study", "lucky", "--json", home=home).stdout)["number"] == before["best"]
    assert verify(home, home.storage).behind == 1, "MLflow has yet to learn of it"
    assert command("sync", "--study", "lucky", home=home).exit_code == 0
    assert said(home) == before and not verify(home, home.storage).differences


def rival(name: str, *ahead: float) -> Rival:
    """Another configuration by how much better trial 3 is under each seed; a lower value is better."""
    again, differences = Spread.of([0.5 + one for one in ahead]), Spread.of(ahead)
    assert again is not None and differences is not None
    return Rival(name, again, differences)


def lines(*rivals: Rival) -> list[str]:
    again = Spread.of([0.5])
    assert again is not None
    return standing("trial 3", again, rivals, "`{} seeds`".format)


def test_rivals_that_cannot_be_told_apart_say_which_seeds_may():
    unsure = rival("trial 7", 0.01, 0.02, 0.09)
    [first, said] = lines(unsure)
    assert first == "best mean under other seeds: trial 3, 0.5"
    assert said.startswith(
        "3 seeds cannot tell trial 3 from trial 7: trial 3 is better by 0.04 (standard error 0.025, n = 3"
    )
    assert said.endswith(f"; `{seeds_needed(unsure.ahead)} seeds` may tell them apart")
    [_, once] = lines(rival("trial 7", 0.1))
    said = "trial 3 is better than trial 7 by 0.1 (n = 1 seed), seed by seed, which one seed cannot confirm"
    assert once == said


def test_no_command_trains_more_folds_than_a_study_declares():
    other = rival("trial 7", 0.01, 0.02, 0.09)
    facts = {"study": "s-confirm-folds", "runs": 3, "means": {"loss": 0.5}, "errors": {"loss": 0.1}}
    of_folds = answer.OtherSeeds(**facts, selected={3: [0.4]}, rivals=[other], by_fold=True)
    [*_, said] = of_folds.lines(3, "`{} seeds`".format)
    assert said.startswith("3 seeds cannot tell trial 3 from trial 7")
    assert said.endswith("; more folds than the study declares may tell them apart")


def test_a_default_that_is_better_stands_first():
    """Its difference is the same as in the other direction, and so are the seeds that would tell it."""
    beyond = rival("the default configuration", -0.01, -0.011, -0.012)
    [first, said, second] = lines(rival("trial 7", 0.1, 0.11), beyond)
    assert first == "best mean under other seeds: the default configuration, 0.489 ± 0.00058; then trial 3, 0.5"
    assert said.startswith("the default configuration is better than trial 3 by 0.011 (") and beyond.wins
    assert second.startswith("trial 3 is better than trial 7 by 0.105 (")
    unsure = rival("the default configuration", -0.01, -0.02, -0.09)
    [_, said] = lines(unsure)
    assert said.startswith(
        "3 seeds cannot tell the default configuration from trial 3: the default configuration is better by 0.04 ("
    )
    assert (
        said.endswith(f"; `{seeds_needed(rival('', 0.01, 0.02, 0.09).ahead)} seeds` may tell them apart")
        and not unsure.wins
    )
