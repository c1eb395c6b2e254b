"""Attention over a paged key/value cache."""

from flax_pallas_attn.paged.allocator import OutOfPagesError, PageAllocator
from flax_pallas_attn.paged.attention import paged_attention
from flax_pallas_attn.paged.cache import PagedKVCache

__all__ = ["OutOfPagesError", "PageAllocator", "PagedKVCache", "paged_attention"]
