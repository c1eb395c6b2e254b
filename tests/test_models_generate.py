"""Generation on the paged cache: the tokens are those of the full forward pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from flax_pallas_attn import aot
from flax_pallas_attn.paged import OutOfPagesError
from flax_pallas_attn.rotary import Rotary
from models.config import PRESETS, GPTConfig
from models.generate import append_and_sample, generate, stream
from models.gpt import GPT
from models.sampling import GREEDY, Sampling

CONFIG = GPTConfig(
    vocab_size=50,
    context_tokens=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=64,
    mlp_width=128,
    rotary=Rotary(),
    normalization="rmsnorm",
    mlp="swiglu",
    use_bias=False,
    tie_head=True,
    dtype="float32",
)
# 80 tokens that come again and again; many follow more than one other, so context decides.
PASSAGE = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 80)
PROMPT = PASSAGE[:6].tolist()
PROMPTS = [PASSAGE[start : start + size].tolist() for start, size in ((0, 1), (9, 8), (40, 6))]


@pytest.fixture(scope="module")
def model():
    """Trained until it knows the passage by heart."""
    graphdef, parameters = nnx.split(GPT(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = optax.adam(3e-3)
    text = np.tile(PASSAGE, 3)

    @jax.jit
    def step(parameters, optimizer_state, rows):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters)(rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state)
        return optax.apply_updates(parameters, updates), optimizer_state, value

    optimizer_state = optimizer.init(parameters)
    generator = np.random.default_rng(1)
    for _ in range(120):
        rows = np.stack([text[i : i + 65] for i in generator.integers(0, 80, 8)])
        parameters, optimizer_state, value = step(parameters, optimizer_state, rows)
    assert value < 0.2, "the model has not learned the passage"
    return nnx.merge(graphdef, parameters)


def test_greedy_decoding_equals_the_full_forward_at_each_step(model):
    """Case 28: 64 tokens, at least 20 of them different, no near ties."""
    [tokens] = generate(model, [PROMPT], max_new_tokens=64, sampling=GREEDY)

    @jax.jit
    def last_logits(row, length):
        return model(row[None])[0, length - 1]

    row = np.zeros(CONFIG.context_tokens, np.int32)
    row[:6] = PROMPT
    expected, margins = [], []
    for length in range(6, 70):
        second, first = np.sort(last_logits(row, length))[-2:]
        margins.append(first - second)
        row[length] = np.argmax(last_logits(row, length))
        expected.append(int(row[length]))
    assert min(margins) > 1e-3
    assert len(set(expected)) >= 20
    assert tokens == expected


def test_prompts_of_different_lengths_decode_as_if_alone(model):
    together = generate(model, PROMPTS, max_new_tokens=9, sampling=GREEDY)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert [tokens] == generate(model, [prompt], max_new_tokens=9, sampling=GREEDY)


def test_sequences_end_at_stop_tokens(model):
    full = generate(model, PROMPTS, max_new_tokens=9, sampling=GREEDY)
    stop = full[1][4]
    ends = [tokens.index(stop) if stop in tokens else 9 for tokens in full]
    assert min(ends) < 9 == max(ends), "some end early, some do not"
    steps = list(stream(model, PROMPTS, max_new_tokens=9, sampling=GREEDY, stop_tokens=[stop]))
    columns = [list(column) for column in zip(*steps, strict=True)]
    for tokens, end, column in zip(full, ends, columns, strict=True):
        assert column == tokens[:end] + [None] * (9 - end)


def test_generation_ends_when_all_sequences_have(model):
    [full] = generate(model, [PROMPT], max_new_tokens=64, sampling=GREEDY)
    [tokens] = generate(
        model, [PROMPT], max_new_tokens=64, sampling=GREEDY, stop_tokens=[full[3], full[2]]
    )
    assert tokens == full[:2]


def test_stream_yields_each_token_as_it_is_drawn(model):
    steps = stream(model, [PROMPT], max_new_tokens=64, sampling=GREEDY)
    [first], [second] = next(steps), next(steps)
    assert [first, second] == PASSAGE[6:8].tolist()


def test_decoding_compiles_once(model):
    """One program reads the prompt, one decodes; another prompt of about its length needs none."""
    before = append_and_sample._cache_size()
    generate(model, [PROMPT], max_new_tokens=30, sampling=GREEDY, num_pages=5)
    assert append_and_sample._cache_size() == before + 2
    other = PASSAGE[3:11].tolist()
    generate(model, [other], max_new_tokens=40, sampling=GREEDY, num_pages=5, seed=3)
    assert append_and_sample._cache_size() == before + 2


def test_draws_from_the_models_distribution_by_default(model):
    drawn = generate(model, [PROMPT], max_new_tokens=30, sampling=Sampling(temperature=1.0))
    assert generate(model, [PROMPT], max_new_tokens=30) == drawn


def test_the_seed_decides_the_draws(model):
    def draw(seed):
        hot = Sampling(temperature=3.0)
        return generate(model, [PROMPT], max_new_tokens=64, sampling=hot, seed=seed)

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


def test_out_of_capacity_is_said_before_anything_runs(model):
    with pytest.raises(ValueError, match=r"prompts\[0\] has 6 tokens.*at most 90 tokens"):
        stream(model, [PROMPT], max_new_tokens=91, sampling=GREEDY)
    [tokens] = generate(model, [PROMPT], max_new_tokens=90, sampling=GREEDY)
    assert len(tokens) == 90
    with pytest.raises(OutOfPagesError, match=r"num_pages=4 or more"):
        stream(model, [PROMPT] * 2, max_new_tokens=20, sampling=GREEDY, num_pages=3)


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([], 5, "prompts is empty"),
        ([[1], []], 5, r"prompts\[1\] is empty"),
        ([[1, 50]], 5, r"prompts\[0\] has token ids from 1 to 50; the model knows 0 to 49"),
        ([[1]], 0, "max_new_tokens=0 must be at least 1"),
        ([[1.7, 2.2]], 5, r"prompts\[0\] has shape \(2,\) and dtype float64; give a row"),
        ([1, 2], 5, r"prompts\[0\] has shape \(\)"),
        (["Hi"], 5, r"prompts\[0\] has shape \(\) and dtype <U2.*text\.encode\(\)"),
        (b"Hi", 5, r"prompts\[0\] has shape \(\)"),
        ([[1] * 96], 5, r"prompts\[0\] has 96 tokens, which leaves no room .*shorten the prompt"),
        (np.zeros((0, 3), int), 5, "prompts is empty"),
        (jnp.array([[1, -2]]), 5, r"prompts\[0\] has token ids from -2 to 1"),
    ],
)
def test_wrong_prompts_are_named(model, prompts, max_new_tokens, message):
    with pytest.raises(ValueError, match=message):
        stream(model, prompts, max_new_tokens=max_new_tokens, sampling=GREEDY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"num_pages": 0}, "num_pages=0 must be at least 1"),
        ({"sampling": None}, "sampling=None must be a Sampling"),
        ({"stop_tokens": 5}, r"stop_tokens has shape \(\) and dtype int64"),
        ({"seed": 2**70}, "seed=1180591620717411303424 must be between"),
        ({"seed": -1}, "seed=-1 must be between"),
    ],
)
def test_wrong_options_are_named(model, changes, message):
    with pytest.raises(ValueError, match=message):
        stream(model, [PROMPT], **({"max_new_tokens": 2, "sampling": GREEDY} | changes))


@pytest.mark.parametrize("kind", [np.array, jnp.array, lambda rows: [bytes(row) for row in rows]])
def test_prompts_may_be_arrays_or_bytes(model, kind):
    rows = [PROMPT, PROMPT[::-1]]
    expected = generate(model, rows, max_new_tokens=3, sampling=GREEDY)
    assert generate(model, kind(rows), max_new_tokens=3, sampling=GREEDY) == expected


def test_learned_positions_decode_too():
    config = dataclasses.replace(CONFIG, rotary=None, normalization="layernorm", mlp="gelu")
    model = GPT(config, rngs=nnx.Rngs(0))
    [tokens] = generate(model, [PROMPT], max_new_tokens=20, sampling=GREEDY)
    logits = jax.jit(model)(jnp.array([PROMPT + tokens]))[0, 5:-1]
    assert tokens == np.argmax(logits, axis=-1).tolist()


@pytest.mark.tpu_compile
def test_decoding_compiles_for_tpu():
    """Each layer runs the kernel, and the cache stays in place."""
    config = PRESETS["tiny"]
    model = GPT(config, rngs=nnx.Rngs(0))
    graphdef, variables = nnx.split(model)
    cache = model.create_cache(num_pages=32, page_size=16)

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(parameters, cache, tokens, page_table, kv_lengths, query_starts, key):
        return append_and_sample(
            graphdef,
            parameters,
            cache,
            tokens,
            page_table,
            kv_lengths,
            query_starts,
            jnp.arange(4),
            key,
            sampling=Sampling(top_k=50, top_p=0.9),
        )

    program = aot.compile_for_tpu(
        decode,
        nnx.to_pure_dict(variables),
        cache,
        jnp.zeros(4, jnp.int32),
        jnp.zeros((4, 8), jnp.int32),
        jnp.ones(4, jnp.int32),
        jnp.arange(5),
        jax.random.key(0),
    )
    assert program.kernels == ("paged_attention",) * config.num_layers
    assert program.alias_bytes >= cache.pages.nbytes
