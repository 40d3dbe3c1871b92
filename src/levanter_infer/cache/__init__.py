"""Paged KV cache: which slot holds a page, what is stored in it, and what one step needs to know of both.

Modules are imported by name, so that `page_math`, which needs no JAX, comes without it.
"""
