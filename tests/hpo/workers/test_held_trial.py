"""Trials in the hands of a process: leases that one thread renews, and a trial that is given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mirrored import Made
from sqlalchemy import select

from hpo.ledger import transactions
from hpo.ledger.database.tables import attempts, trials
from hpo.workers.held_trial import HeldTrial, Holder, TrialLeases, holding
from trainer.errors import Fenced


@pytest.fixture
def made(home) -> Iterator[Made]:
    study = Made(home)
    study.ask(2)
    yield study
    study.ledger.close()


def test_of_trials_renewed_together_the_taken_one_is_lost_alone(made, home):
    with TrialLeases(made.ledger, "both trials", 600) as leases:
        first, second = (HeldTrial(Holder(made.ledger, home), made.claim(), leases) for _ in range(2))
        made.ledger.transact(lambda c: transactions.lose(c, first.claim.trial_id, first.claim.fence, "test"))
        leases.renew()
        with pytest.raises(Fenced, match="trial 0 was taken from this attempt"):
            leases.check(first.claim)
        leases.check(second.claim)
        first.release()
        assert len(leases) == 1


def test_a_trial_that_is_given_back_waits_and_has_lost_no_worker(made, home):
    with holding(Holder(made.ledger, home), made.claim()) as trial:
        trial.give_back(OSError("the disk is full"))
    ended = select(trials.c.state, trials.c.losses, attempts.c.outcome).join(attempts).where(trials.c.number == 0)
    assert made.ledger.look(lambda c: c.execute(ended).one()) == ("waiting", 0, "preempted")
