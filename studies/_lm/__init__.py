"""What the studies of language models share, and no study itself: base model, LoRA around it, records of text."""
