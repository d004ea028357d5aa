"""The states of a trial, as the ledger spells them."""

from __future__ import annotations

# The states of a trial. `waiting`, `running` and `paused` are open, the rest terminal and never change.
OPEN_STATES = ("waiting", "running", "paused")
TERMINAL_STATES = ("complete", "pruned", "infeasible", "failed")
STATES = OPEN_STATES + TERMINAL_STATES
UNSETTLED = ("waiting", "running")  # which a trial after them may wait for: a paused one goes on in no given time
