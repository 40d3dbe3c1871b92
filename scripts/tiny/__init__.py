"""Training data and evaluation of the tiny model; `scripts/train_tiny.py` puts it together."""
