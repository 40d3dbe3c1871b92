"""Paged KV cache: which slot holds a page, what is stored in it, and what one step needs to know of both.

A model has one pool for each kind of memory that its layers have: `memory` names the kinds, `pool` has the contract of
a pool, `kv_pages` is the pool of keys and values, and `cache` holds the pools of a model. A new kind of memory fills in
the contracts of `memory.Memory` and `pool.Pool` and is named by the mixer block of its layers.

Modules are imported by name, so that `page_math`, which needs no JAX, comes without it.
"""
