"""Flash and paged attention for Flax on TPU."""
