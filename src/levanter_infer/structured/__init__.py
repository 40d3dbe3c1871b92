"""Structured output: the tokens that a sample may generate, by automata over tokens or llguidance's matchers. Imports no JAX."""
