"""Notifies people of a study's events by webhook, e-mail or a command of theirs, each event once by its id."""
