"""A small training run that shows that saving and resuming works: it learns to sort digits."""
