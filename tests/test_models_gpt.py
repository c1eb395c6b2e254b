"""The GPT: its two forms agree, and it looks at what it may look at."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_pallas_attn.rotary import Rotary
from models.config import GPTConfig
from models.gpt import GPT

LLAMA_STYLE = GPTConfig(
    vocab_size=61,
    context_tokens=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=32,
    mlp_width=48,
    rotary=Rotary(),
    normalization="rmsnorm",
    mlp="swiglu",
    use_bias=False,
    tie_head=False,
    dtype="float32",
)
GPT2_STYLE = dataclasses.replace(
    LLAMA_STYLE,
    num_kv_heads=4,
    rotary=None,
    normalization="layernorm",
    mlp="gelu",
    use_bias=True,
    tie_head=True,
)
OPTIONS = dataclasses.replace(
    LLAMA_STYLE,
    num_kv_heads=1,
    normalize_query_key=True,
    local_window_size=5,
    logits_soft_cap=3.0,
)
STYLES = [
    pytest.param(LLAMA_STYLE, id="llama"),
    pytest.param(GPT2_STYLE, id="gpt2"),
    pytest.param(OPTIONS, id="options"),
]


def make_model(config):
    return GPT(config, rngs=nnx.Rngs(0))


def logits_of(model, tokens, **arguments):
    """One compiled program, rather than one for each operation."""
    return np.asarray(jax.jit(lambda tokens: model(tokens, **arguments))(tokens))


def draw_tokens(*shape, vocab_size=61, seed=1):
    return jax.random.randint(jax.random.key(seed), shape, 0, vocab_size)


@pytest.mark.parametrize("config", STYLES)
def test_paged_form_equals_training_form(config):
    """Two prompts of 7 and 5 tokens in one call, then both one token at a time."""
    model = make_model(config)
    rows = draw_tokens(2, 12)
    expected = logits_of(model, rows)
    cache = model.create_cache(num_pages=8, page_size=4)
    page_table = jnp.array([[6, 1, 3], [0, 5, 2]])
    lengths = np.array([7, 5])

    @jax.jit
    def append(tokens, cache, kv_lengths, query_starts, logits_at):
        return model.paged(
            tokens,
            cache,
            page_table=page_table,
            kv_lengths=kv_lengths,
            query_starts=query_starts,
            logits_at=logits_at,
        )

    prompts = jnp.concatenate([rows[0, :7], rows[1, :5], jnp.zeros(4, jnp.int32)])
    logits, cache = append(
        prompts, cache, jnp.asarray(lengths), jnp.array([0, 7, 12]), jnp.arange(12)
    )
    np.testing.assert_allclose(logits[:7], expected[0, :7], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[7:], expected[1, :5], rtol=1e-4, atol=1e-4)
    for step in range(5):
        tokens = rows[jnp.arange(2), lengths + step]
        logits, cache = append(
            tokens, cache, jnp.asarray(lengths + step + 1), jnp.arange(3), jnp.arange(2)
        )
        np.testing.assert_allclose(
            logits, expected[np.arange(2), lengths + step], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("config", STYLES)
def test_a_token_sees_itself_and_what_is_before_it(config):
    model = make_model(config)
    tokens = draw_tokens(1, 10)
    changed = tokens.at[0, 6].add(1) % config.vocab_size
    before, after = logits_of(model, jnp.concatenate([tokens, changed]))
    np.testing.assert_array_equal(before[:6], after[:6])
    assert (np.abs(before[6:] - after[6:]).max(-1) > 1e-3).all()


def test_positions_are_told_apart():
    """Without them, a token after equal tokens could not know how many there were."""
    for config in (LLAMA_STYLE, GPT2_STYLE):
        logits = logits_of(make_model(config), jnp.array([[3, 7, 5, 5], [7, 3, 5, 5]]))
        assert np.abs(logits[0, -1] - logits[1, -1]).max() > 1e-3


def test_documents_packed_in_a_row_are_as_if_alone():
    for config in (LLAMA_STYLE, GPT2_STYLE):
        model = make_model(config)
        first, second = draw_tokens(1, 5), draw_tokens(1, 7, seed=2)
        packed = logits_of(
            model,
            jnp.concatenate([first, second], axis=1),
            segment_ids=jnp.array([[0] * 5 + [1] * 7]),
            positions=jnp.array([[*range(5), *range(7)]]),
        )
        np.testing.assert_allclose(packed[:, :5], logits_of(model, first), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(packed[:, 5:], logits_of(model, second), rtol=1e-4, atol=1e-4)


def test_dropout_follows_the_key():
    model = make_model(dataclasses.replace(LLAMA_STYLE, dropout_rate=0.5))
    tokens = draw_tokens(2, 8)

    @jax.jit
    def draw(key):
        return model(tokens, deterministic=False, rngs=nnx.Rngs(dropout=key))

    def logits(seed):
        return draw(jax.random.key(seed))

    np.testing.assert_array_equal(logits(0), logits(0))
    assert np.abs(logits(0) - logits(1)).max() > 1e-2
    np.testing.assert_array_equal(
        logits_of(model, tokens), logits_of(make_model(LLAMA_STYLE), tokens)
    )
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState)), "dropout keys are arguments"


def test_bfloat16_computes_with_float32_parameters():
    config = dataclasses.replace(LLAMA_STYLE, dtype="bfloat16")
    model = make_model(config)
    tokens = draw_tokens(2, 8)
    logits = logits_of(model, tokens)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    full = logits_of(make_model(LLAMA_STYLE), tokens)
    error = np.abs(logits - full).max() / np.abs(full).max()
    assert 1e-4 < error < 3e-2, "rounded, but not by more than bfloat16 is"


def test_tied_head_has_no_parameters_of_its_own():
    assert "head" not in nnx.to_pure_dict(nnx.state(make_model(GPT2_STYLE)))
    assert "head" in nnx.to_pure_dict(nnx.state(make_model(LLAMA_STYLE)))


@pytest.mark.parametrize("token", [-1, 61])
def test_a_token_outside_the_vocabulary_is_named(token):
    with pytest.raises(ValueError, match=rf"tokens has ids from .*{token}.*knows 0 to 60"):
        make_model(LLAMA_STYLE)(jnp.array([[3, token]]))


@pytest.mark.parametrize(
    ("shape", "message"),
    [((8,), r"tokens has shape \(8,\); expected \[B, T\]"), ((1, 33), "context_tokens=32")],
)
def test_wrong_tokens_are_named(shape, message):
    with pytest.raises(ValueError, match=message):
        make_model(LLAMA_STYLE)(jnp.zeros(shape, jnp.int32))
