"""What the tiny model learns and how it is measured; `scripts/train_tiny.py` puts it together."""
