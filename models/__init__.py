"""A decoder-only transformer that exercises flax_pallas_attn: model, sampling, generation."""
