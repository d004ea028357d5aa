"""Names the states of a trial as the ledger stores them."""

from __future__ import annotations

# The states of a trial. `waiting`, `running` and `paused` are open, the rest terminal and never change.
OPEN_STATES = ("waiting", "running", "paused")
TERMINAL_STATES = ("complete", "pruned", "infeasible", "failed")
STATES = OPEN_STATES + TERMINAL_STATES
UNSETTLED = ("waiting", "running")  # later trials may wait for these, not for a paused one, which may go on late
