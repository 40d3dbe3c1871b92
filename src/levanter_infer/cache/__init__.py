"""Paged KV cache: who holds a page, what is stored in it, and what one step needs to know of both."""

from levanter_infer.cache.batch_info import PageBatchInfo as PageBatchInfo
from levanter_infer.cache.kv_pages import KvPages as KvPages
from levanter_infer.cache.page_table import PageTable as PageTable
from levanter_infer.cache.prefix_table import PrefixTable as PrefixTable
