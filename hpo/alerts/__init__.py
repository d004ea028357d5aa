"""Tells people what happens to a study: by webhook, e-mail or a command of theirs, each event once by its id."""
