"""Attention in plain XLA operations, on any platform."""
