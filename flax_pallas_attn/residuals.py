"""What a gradient needs of the forward pass, by names that `jax.checkpoint` knows."""

import jax
from jax.ad_checkpoint import checkpoint_name

CHECKPOINT_NAMES = ("attention_output", "attention_logsumexp")
"""For `jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)`: with these two saved the
backward pass of `dot_product_attention` does not run its forward pass again."""


def named(output: jax.Array, logsumexp: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both under their names; to be returned and saved as they come out of here."""
    output_name, logsumexp_name = CHECKPOINT_NAMES
    return checkpoint_name(output, output_name), checkpoint_name(logsumexp, logsumexp_name)
