"""Holds the process that drives one study: it asks the sampler, hands out trials and ends the study."""
