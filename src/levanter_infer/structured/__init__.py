"""Structured output: what a sample may say, as automata over tokens and as llguidance's matchers. Imports no JAX."""
