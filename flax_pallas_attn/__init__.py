"""Flash and paged attention for Flax on TPU."""

from flax_pallas_attn.attention import attention_fn, dot_product_attention
from flax_pallas_attn.explain import AttentionExplanation, explain_attention
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Alibi, Dropout
from flax_pallas_attn.masking import Positions, SegmentIds
from flax_pallas_attn.paged.allocator import OutOfPagesError, PageAllocator
from flax_pallas_attn.paged.attention import paged_attention
from flax_pallas_attn.paged.cache import PagedKVCache
from flax_pallas_attn.residuals import CHECKPOINT_NAMES
from flax_pallas_attn.rotary import Llama3Scaling, Rotary, YarnScaling
from flax_pallas_attn.sharding import AttentionSharding

__version__ = "0.1.0"

__all__ = [
    "CHECKPOINT_NAMES",
    "Alibi",
    "AttentionExplanation",
    "AttentionSharding",
    "Dropout",
    "Llama3Scaling",
    "OutOfPagesError",
    "PageAllocator",
    "PagedKVCache",
    "Positions",
    "Rotary",
    "SegmentIds",
    "Tiles",
    "YarnScaling",
    "attention_fn",
    "dot_product_attention",
    "explain_attention",
    "paged_attention",
]
