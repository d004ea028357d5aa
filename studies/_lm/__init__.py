"""Holds code that the language model studies share: the base model, LoRA around it, records of text. Not a study."""
