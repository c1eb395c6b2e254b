"""Fast attention in a Flax model: change one class, keep the code and the checkpoint.

$ python examples/attention_in_your_flax_model.py
NNX, other class: parameters ['attention', 'norm'] load; outputs within 1e-5: True
NNX, decoded as a prompt of 100 and 28 single tokens: outputs within 1e-5: True
NNX, flax's class with our function: outputs within 1e-5: True
Linen, other class: outputs within 1e-5: True
Linen, new options: (2, 128, 64)
"""

import jax
import jax.numpy as jnp
from flax import linen, nnx

import flax_pallas_attn
import flax_pallas_attn.linen
import flax_pallas_attn.nnx

x = jax.random.normal(jax.random.key(0), (2, 128, 64))  # [batch, length, features]


def close(a, b):
    return f"outputs within 1e-5: {bool(jnp.abs(a - b).max() < 1e-5)}"


# ---- NNX. A block of a model that has been using flax's attention; its class is an argument here,
# in your code it is one word to change.


class Block(nnx.Module):
    def __init__(self, attention_class, *, rngs: nnx.Rngs, **options):
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.attention = attention_class(
            num_heads=4, in_features=64, decode=False, rngs=rngs, **options
        )

    def __call__(self, x, **call):
        return x + self.attention(self.norm(x), **call)


before = Block(nnx.MultiHeadAttention, rngs=nnx.Rngs(0))
checkpoint = nnx.state(before)

after = Block(flax_pallas_attn.nnx.MultiHeadAttention, rngs=nnx.Rngs(1))
nnx.update(after, checkpoint)
print(
    f"NNX, other class: parameters {sorted(checkpoint)} load;",
    close(after(x, is_causal=True), before(x, is_causal=True)),
)

# What flax's class does not have: rotary positions, fewer key/value heads, a window, packed rows,
# and decoding that takes a whole prompt at once. The cache is made of pages.
block = Block(
    flax_pallas_attn.nnx.MultiHeadAttention,
    num_kv_heads=2,
    rotary=flax_pallas_attn.Rotary(),
    local_window_size=(63, 0),
    rngs=nnx.Rngs(0),
)
block.attention.init_cache(x.shape)


@nnx.jit
def decode(block, x):
    return block(x, decode=True)


outputs = [decode(block, x[:, :100])] + [decode(block, x[:, t : t + 1]) for t in range(100, 128)]
print(
    "NNX, decoded as a prompt of 100 and 28 single tokens:",
    close(jnp.concatenate(outputs, axis=1), block(x, is_causal=True)),
)

# Where the class must stay flax's, the function alone can change.
function_only = Block(
    nnx.MultiHeadAttention, attention_fn=flax_pallas_attn.attention_fn, rngs=nnx.Rngs(0)
)
print(
    "NNX, flax's class with our function:",
    close(function_only(x, is_causal=True), before(x, is_causal=True)),
)

# ---- Linen. The same with init and apply.
before = linen.MultiHeadDotProductAttention(num_heads=4)
variables = before.init(jax.random.key(0), x)

after = flax_pallas_attn.linen.MultiHeadDotProductAttention(num_heads=4)
mask = linen.make_causal_mask(x[..., 0])
expected = before.apply(variables, x, mask=mask)
print("Linen, other class:", close(after.apply(variables, x, mask=mask), expected))

# `is_causal` in place of a mask: no T by T array, and half the work.
layer = flax_pallas_attn.linen.MultiHeadDotProductAttention(
    num_heads=4, num_kv_heads=1, normalize_qk="rms", rotary=flax_pallas_attn.Rotary()
)
variables = layer.init(jax.random.key(0), x)
print("Linen, new options:", layer.apply(variables, x, is_causal=True).shape)
