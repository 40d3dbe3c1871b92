"""Structured output: which tokens may follow, by automata over tokens or llguidance's matchers. Imports no JAX."""
