"""The public function: what it means, what it takes, which implementation runs.

The default implementation, which is xla on CPU, stands for all where no other is named: each is
compared with the reference in the tests of its own.

Numbers in names and comments are rows of the list of cases that hurt users elsewhere.
"""

import functools

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn import (
    Alibi,
    Dropout,
    PagedKVCache,
    Positions,
    SegmentIds,
    Tiles,
    aot,
    attention_fn,
    dot_product_attention,
    paged_attention,
)
from tests.jaxprs import inside, kernels, largest_size

IMPLEMENTATIONS = ("reference", "xla", "pallas")
SMALL_TILES = Tiles(
    query=128,
    key=128,
    key_chunk=256,
    backward_key=128,
    backward_query=128,
    backward_query_chunk=256,
)


def draw(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def draw_qkv(B=2, T=24, S=24, N=4, K=2, H=8, dtype=np.float32):
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return tuple(draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))


def abstract_qkv(B=1, T=64, S=64, N=4, K=2, H=32, dtype=jnp.float32):
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def relative_error(x, expected) -> float:
    """Largest error as a share of the largest value; absolute where all of it is below 1e-3."""
    x, expected = (np.asarray(a, np.float64) for a in (x, expected))
    assert x.shape == expected.shape
    return np.abs(x - expected).max() / max(np.abs(expected).max(), 1e-3)


def assert_trees_close(tree, expected, tolerance):
    errors = jax.tree.map(relative_error, tree, expected)
    assert max(jax.tree.leaves(errors)) <= tolerance, errors


def output_and_gradients(attend, arrays, seed=7):
    """Output of `attend(*arrays)` and the gradients of its product with a random array."""

    @jax.jit
    def step(*arrays):
        output, vjp = jax.vjp(attend, *arrays)
        return output, *vjp(jnp.asarray(draw(*output.shape, seed=seed), output.dtype))

    return step(*arrays)


def in_float64(attend, arrays):
    """Runs `attend` and its gradients in float64, on the host's rounding alone."""
    with jax.enable_x64(True):
        return jax.tree.map(
            np.asarray,
            output_and_gradients(attend, [np.asarray(x).astype(np.float64) for x in arrays]),
        )


# --- The meaning, against jax.nn ---

JAX_NN_ARGUMENTS = {
    "nothing": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bias": {"bias": draw(1, 4, 24, 24)},
    "boolean mask": {"mask": draw(2, 1, 24, 24) + 3 * np.eye(24) > 0},
    "window": {"local_window_size": 3},
    "one-sided window, causal": {"local_window_size": (5, 2), "is_causal": True},
    "lengths": {
        "key_value_seq_lengths": np.array([9, 24], np.int32),
        "query_seq_lengths": np.array([24, 11], np.int32),
    },
    "all": {
        "bias": draw(2, 1, 1, 24),
        "mask": draw(1, 4, 24, 24) + 3 * np.eye(24) > 0,
        "scale": 2.0,
        "is_causal": True,
        "local_window_size": (20, 0),
    },
}


@pytest.mark.parametrize("name", JAX_NN_ARGUMENTS)
def test_equals_jax_nn(name):
    arguments = JAX_NN_ARGUMENTS[name]
    ours = functools.partial(dot_product_attention, **arguments)
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla", **arguments)
    assert_trees_close(output_and_gradients(ours, draw_qkv()), in_float64(theirs, draw_qkv()), 2e-6)


def test_rank_three_has_no_batch():
    query, key, value = (x[0] for x in draw_qkv())
    bias = draw(4, 24, 24)
    output, logsumexp = dot_product_attention(query, key, value, bias, return_residual=True)
    theirs = jax.nn.dot_product_attention(
        query, key, value, bias, implementation="xla", return_residual=True
    )
    assert_trees_close((output, logsumexp), theirs, 2e-6)


def test_logsumexp_is_float32_and_has_gradients():
    """Jax.nn's has the dtype of the inputs."""
    arrays = draw_qkv(dtype=jnp.bfloat16)

    def logsumexp(query, key, value):
        return dot_product_attention(query, key, value, return_residual=True)[1]

    def plain(query, key, value):
        scores = jnp.einsum("btkgh,bskh->btkgs", query.reshape(2, 24, 2, 2, 8), key) * 8**-0.5
        return jax.nn.logsumexp(scores, axis=-1).reshape(2, 24, 4) + 0 * value.sum()

    assert logsumexp(*arrays).dtype == jnp.float32
    result = output_and_gradients(logsumexp, arrays)
    expected = in_float64(plain, arrays)
    assert_trees_close(result[0], expected[0], 1e-6)
    assert_trees_close(result[1:3], expected[1:3], 1e-2)
    assert not result[3].any()


def test_heads_first_layout_only_moves_axes():
    arrays = draw_qkv()
    attend = functools.partial(dot_product_attention, is_causal=True, return_residual=True)
    output, logsumexp = attend(*arrays)
    turned = attend(*(x.swapaxes(1, 2) for x in arrays), layout="BNTH")
    np.testing.assert_array_equal(turned[0].swapaxes(1, 2), output)
    np.testing.assert_array_equal(turned[1].swapaxes(1, 2), logsumexp)


def test_case_5_scale_is_one_over_root_of_head_size_everywhere():
    query, key, value = draw_qkv(B=1, T=3, S=5, H=20)
    attend = functools.partial(dot_product_attention, is_causal=True, query_offset=2)
    expected = attend(query, key, value, scale=20**-0.5)
    np.testing.assert_array_equal(attend(query, key, value), expected)

    visible = np.arange(5) <= 2 + np.arange(3)[:, None]
    assert_trees_close(attention_fn(query, key, value, mask=visible), expected, 2e-6)

    cache = PagedKVCache.create(
        num_layers=1, num_pages=1, page_size=8, num_kv_heads=2, head_dim=20, dtype="float32"
    )
    tables = {"page_table": np.zeros((1, 1), np.int32), "kv_lengths": np.array([5])}
    cache = cache.write(key[0], value[0], layer=0, query_starts=np.array([0, 5]), **tables)
    paged, _ = paged_attention(query[0], cache, query_starts=np.array([0, 3]), **tables)
    assert_trees_close(paged[None], expected, 2e-6)


# --- Who sees whom ---


def visible_keys(T, S, **arguments):
    """0/1 `[B, T, S]`: which keys get a share, read off the output with one value per key."""
    query = np.zeros((2, T, 1, 8), np.float32)
    key = np.zeros((2, S, 1, 8), np.float32)
    value = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (2, S, 1, S))
    attend = functools.partial(dot_product_attention, **arguments)
    shares = np.asarray(jax.jit(attend)(query, key, value))[:, :, 0]
    count = np.maximum((shares > 0).sum(-1, keepdims=True), 1)
    np.testing.assert_allclose(shares, (shares > 0) / count, rtol=1e-6)
    return (shares > 0).astype(int)


CAUSAL_3_BY_5 = {
    -1: [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]],
    0: [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
    2: [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_case_6_query_offset_moves_the_alignment(implementation):
    visible = functools.partial(visible_keys, 3, 5, is_causal=True, implementation=implementation)
    np.testing.assert_array_equal(visible(), [CAUSAL_3_BY_5[0]] * 2)  # as in jax.nn
    np.testing.assert_array_equal(visible(query_offset=-1), [CAUSAL_3_BY_5[-1]] * 2)
    np.testing.assert_array_equal(visible(query_offset=np.int32(2)), [CAUSAL_3_BY_5[2]] * 2)
    np.testing.assert_array_equal(visible(query_offset=jnp.asarray(2)), [CAUSAL_3_BY_5[2]] * 2)
    np.testing.assert_array_equal(
        visible(query_offset=jnp.array([2, -1])), [CAUSAL_3_BY_5[2], CAUSAL_3_BY_5[-1]]
    )


def test_window_counts_keys_beside_ones_own():
    np.testing.assert_array_equal(
        visible_keys(4, 4, local_window_size=(2, 1))[0],
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]],
    )
    np.testing.assert_array_equal(
        visible_keys(2, 5, local_window_size=(1, 0), query_offset=2)[0],
        [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0]],
    )


def test_positions_order_packed_and_shuffled_tokens():
    query = np.array([[0, 1, 0], [4, 2, 0]])
    key = np.array([[0, 1, 0, 1], [3, 0, 4, 1]])
    np.testing.assert_array_equal(
        visible_keys(3, 4, is_causal=True, positions=Positions(query, key)),
        [[[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0]], [[1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0]]],
    )


def test_a_rule_and_a_mask_of_any_dtype():
    expected = [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    same_parity = lambda query, key: (query - key) % 2 == 0  # noqa: E731
    np.testing.assert_array_equal(visible_keys(3, 4, mask=same_parity)[0], expected)
    for dtype in (bool, np.int8, np.float32, jnp.bfloat16):
        np.testing.assert_array_equal(
            visible_keys(3, 4, mask=np.array(expected, dtype))[0], expected
        )


def test_a_negative_segment_is_padding():
    segments = SegmentIds(np.array([[0, 1, -1]]), np.array([[0, -1, 1, 1]]))
    np.testing.assert_array_equal(
        visible_keys(3, 4, segment_ids=segments)[0],
        [[1, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]],
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_7_rows_that_see_nothing_are_zero(implementation, interpret):
    """One row, a whole tile, a whole sequence; by lengths, segments, a dense mask, a window."""
    B, T, S, N, K, H = 4, 256, 200, 2, 1, 16
    segments = np.zeros((B, T), np.int32)
    segments[1, 128:] = 5
    dense = np.ones((B, 1, T, S), bool)
    dense[2, 0, 17] = False
    empty = np.zeros((B, T), bool)
    empty[0] = empty[1, 128:] = empty[2, 17] = empty[3] = True

    def attend(query, key, value):
        output, logsumexp = dot_product_attention(
            query,
            key,
            value,
            mask=dense,
            key_value_seq_lengths=np.array([0, S, S, S]),
            segment_ids=SegmentIds(segments, np.zeros((B, S), np.int32)),
            query_offset=np.array([0, 0, 0, 1000]),
            local_window_size=(300, 300),
            implementation=implementation,
            tiles=SMALL_TILES if implementation == "pallas" else None,
            return_residual=True,
        )
        return (output, jnp.where(empty[..., None], 0, logsumexp)), logsumexp

    @jax.jit
    def step(query, key, value):
        output, vjp, logsumexp = jax.vjp(attend, query, key, value, has_aux=True)
        return output[0], logsumexp, vjp(jax.tree.map(jnp.ones_like, output))

    query, key, value = draw_qkv(B, T, S, N, K, H)
    output, logsumexp, gradients = jax.tree.map(np.asarray, step(query, key, value))
    assert not output[empty].any()
    assert (logsumexp[empty] == -jnp.inf).all()
    assert np.isfinite(logsumexp[~empty]).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    assert not gradients[0][empty].any()
    assert not gradients[1][[0, 3]].any()
    assert not gradients[2][[0, 3]].any()

    # What is left is what it would be alone.
    alone = dot_product_attention(query[1:2, :128], key[1:2], value[1:2], implementation="xla")
    assert relative_error(output[1, :128], alone[0]) < 5e-6


# --- Shapes and dtypes ---


@pytest.mark.parametrize("length", [1, 127, 129, 1000, 4092])
def test_case_2_any_length(length):
    arrays = draw_qkv(1, length, length, 1, 1, 16)
    xla, reference = (
        functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
        for implementation in ("xla", "reference")
    )
    assert_trees_close(
        output_and_gradients(xla, arrays),
        in_float64(reference, arrays),
        5e-6,
    )


def test_case_8_large_logits_and_few_keys():
    query, key, value = draw_qkv(1, 500, 20, 2, 2, 16)
    xla, reference = (
        functools.partial(dot_product_attention, is_causal=True, implementation=implementation)
        for implementation in ("xla", "reference")
    )
    arrays = (20 * query, key, value)
    assert_trees_close(output_and_gradients(xla, arrays), in_float64(reference, arrays), 2e-5)


@pytest.mark.parametrize(("N", "K"), [(8, 2), (4, 1), (6, 3)])
def test_case_9_gradients_of_shared_heads_are_sums(N, K):
    query, key, value = draw_qkv(N=N, K=K)
    ours = functools.partial(dot_product_attention)

    def repeated(query, key, value):
        key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
        return jax.nn.dot_product_attention(query, key, value, implementation="xla")

    assert_trees_close(
        output_and_gradients(ours, (query, key, value)),
        in_float64(repeated, (query, key, value)),
        2e-6,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_9_keys_and_values_are_not_repeated(implementation):
    """With one query per head, keys and values are by far the largest arrays there are."""
    B, S, N, K, H = 1, 4096, 16, 2, 64
    arrays = abstract_qkv(B, 1, S, N, K, H)

    def step(query, key, value):
        attend = functools.partial(dot_product_attention, implementation=implementation)
        return output_and_gradients(attend, (query, key, value))

    assert B * S * K * H <= largest_size(step, *arrays) <= 2 * B * S * K * H
    with_repeated = lambda q, k, v: step(q, *(jnp.repeat(x, N // K, 2) for x in (k, v)))  # noqa: E731
    assert largest_size(with_repeated, *arrays) >= B * S * N * H


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_case_15_no_array_grows_with_queries_times_keys(implementation):
    T, N, H = 2**15, 1, 64

    def step(query, key, value):
        attend = functools.partial(
            dot_product_attention,
            is_causal=True,
            local_window_size=(4096, 0),
            implementation=implementation,
        )
        return output_and_gradients(attend, (query, key, value))

    assert largest_size(step, *abstract_qkv(1, T, T, N, 1, H)) <= 2 * T * H


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_case_10_dtypes(dtype):
    arrays = (*draw_qkv(dtype=dtype), draw(1, 4, 24, 24))  # the bias is float32
    result = output_and_gradients(dot_product_attention, arrays)
    assert [x.dtype for x in result] == [dtype, dtype, dtype, dtype, jnp.float32]
    expected = in_float64(jax.nn.dot_product_attention, arrays)
    tolerance = {jnp.float16: 2e-3, jnp.bfloat16: 2e-2, jnp.float32: 2e-6}[dtype]
    assert_trees_close(result, expected, tolerance)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [(None, "HIGHEST"), ("highest", "HIGHEST"), ("default", "DEFAULT")],
)
def test_case_10_float32_kernels_multiply_in_full_precision(precision, expected):
    expected = jax.lax.Precision[expected]
    calls = kernels(pallas_step(precision=precision), *abstract_qkv())
    assert calls.keys() == {"flash_forward", "flash_backward"}
    for call in calls.values():
        products = [eqn for eqn in inside(call) if eqn.primitive.name == "dot_general"]
        assert products
        assert {eqn.params["precision"] for eqn in products} == {(expected, expected)}


def test_case_10_bfloat16_kernels_sum_in_float32():
    calls = kernels(pallas_step(precision="highest"), *abstract_qkv(dtype=jnp.bfloat16))
    for call in calls.values():
        for eqn in inside(call):
            if eqn.primitive.name == "dot_general":
                # Mosaic compiles no other precision of bfloat16 operands.
                assert eqn.params["precision"] is None
                assert eqn.params["preferred_element_type"] == jnp.float32


def pallas_step(**arguments):
    """Forward and backward through the kernels."""

    def step(query, key, value):
        attend = functools.partial(dot_product_attention, implementation="pallas", **arguments)
        output, vjp = jax.vjp(attend, query, key, value)
        return vjp(output)

    return step


def test_case_11_a_traced_scale_has_a_gradient():
    def attend(query, key, value, scale):
        return dot_product_attention(query, key, value, scale=scale, is_causal=True)

    def plain(query, key, value, scale):
        return jax.nn.dot_product_attention(query * scale, key, value, scale=1.0, is_causal=True)

    arrays = (*draw_qkv(), np.float32(0.4))
    assert_trees_close(output_and_gradients(attend, arrays), in_float64(plain, arrays), 2e-6)


def test_case_11_the_kernels_take_a_traced_scale():
    calls = kernels(
        lambda q, k, v, scale: pallas_step(scale=scale)(q, k, v),
        *abstract_qkv(),
        jax.ShapeDtypeStruct((), jnp.float32),
    )
    assert calls.keys() == {"flash_forward", "flash_backward"}


def test_case_11_a_dense_mask_traced_in_a_while_loop():
    query, key, value = draw_qkv()

    def attend(mask):
        return dot_product_attention(query, key, value, mask=mask)

    def widen(state):
        step, _ = state
        return step + 1, attend(jnp.arange(24) <= step * jnp.ones((24, 1)))

    _, output = jax.jit(
        lambda: jax.lax.while_loop(lambda state: state[0] < 5, widen, (0, jnp.zeros_like(query)))
    )()
    expected = attend(np.broadcast_to(np.arange(24) <= 4, (24, 24)))
    assert_trees_close(output, expected, 1e-6)


def test_case_12_vmap_equals_a_loop():
    query, key, value = draw_qkv(B=3, T=6, S=6)
    masks = draw(3, 6, 6) + 3 * np.eye(6) > 0
    segments = np.array([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, 3, 3]])
    attend = functools.partial(dot_product_attention, is_causal=True)

    def over_batch(query, key, value, segments):
        return attend(query, key, value, segment_ids=SegmentIds(segments, segments))

    def over_heads(query, key, value):
        return attend(query[:, :, None], key[:, :, None], value[:, :, None])

    def over_masks(mask):
        return attend(query, key, value, mask=mask)

    for fn, axis, arguments in (
        (over_batch, 0, (query, key, value, segments)),
        (over_heads, 2, (query[:, :, :2], key, value)),
        (over_masks, 0, (masks,)),
    ):
        looped = [
            fn(*(np.take(x, i, axis) for x in arguments)) for i in range(arguments[0].shape[axis])
        ]
        mapped = jax.jit(jax.vmap(fn, in_axes=axis))(*arguments)
        assert_trees_close(mapped, np.stack(looped), 2e-6)


@pytest.mark.tpu_compile
def test_case_12_the_kernels_compile_under_vmap():
    """With units listed in scalar memory and without: the mapped axis is one of the grid."""
    segments = jax.ShapeDtypeStruct((3, 1, 64), jnp.int32)

    def step(query, key, value, segments):
        return pallas_step(segment_ids=SegmentIds(segments, segments))(query, key, value)

    arrays = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in abstract_qkv()]
    program = aot.compile_for_tpu(jax.vmap(step), *arrays, segments)
    assert program.kernels == ("flash_forward", "flash_backward")
    program = aot.compile_for_tpu(jax.vmap(pallas_step()), *arrays)
    assert program.kernels == ("flash_forward", "flash_backward")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_case_18_documents_of_a_row_do_not_touch(implementation, interpret):
    """Another document A, NaN included, leaves output and gradients of B bit-equal."""
    first, T = 150, 300
    segments = (np.arange(T) >= first).astype(np.int32)[None]
    arrays = draw_qkv(1, T, T, 2, 1, 16)
    perturbed = [x.copy() for x in arrays]
    for x in perturbed:
        x[:, :first] += 1
    perturbed[2][:, 3] = np.nan

    @jax.jit
    def step(query, key, value):
        attend = functools.partial(
            dot_product_attention,
            is_causal=True,
            segment_ids=SegmentIds(segments, segments),
            implementation=implementation,
            tiles=SMALL_TILES if implementation == "pallas" else None,
        )
        return output_and_gradients(attend, (query, key, value))

    for own, other in zip(step(*arrays), step(*perturbed), strict=True):
        np.testing.assert_array_equal(own[:, first:], other[:, first:])
        assert not np.array_equal(own[:, :first], other[:, :first])
        assert np.isfinite(own).all()


# --- Cost (19) ---

COSTS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, offset": {"is_causal": True, "query_offset": 300},
    "window": {"local_window_size": (100, 30)},
    "causal window": {"local_window_size": (200, 0), "is_causal": True},
}


def visible_pairs(T, S, is_causal=False, query_offset=0, local_window_size=(10**6, 10**6)):
    distance = query_offset + np.arange(T)[:, None] - np.arange(S)
    left, right = local_window_size
    return (distance >= (0 if is_causal else -right)) & (distance <= left)


def visited_scores(T, S, query_size, key_size, **arguments):
    """Scores of all tiles with anything in them, counted one by one; tiles are whole."""
    T, S = T + -T % query_size, S + -S % key_size
    tiles = visible_pairs(T, S, **arguments).reshape(
        T // query_size, query_size, S // key_size, key_size
    )
    return tiles.any(axis=(1, 3)).sum() * query_size * key_size


@pytest.mark.parametrize("name", COSTS)
def test_case_19_cost_counts_the_tiles_visited(name):
    arguments = COSTS[name]
    B, T, S, N, K, H, Hv = 2, 600, 1000, 4, 2, 64, 32
    query, key, _ = abstract_qkv(B, T, S, N, K, H)
    value = jax.ShapeDtypeStruct((B, S, K, Hv), jnp.float32)
    tiles = Tiles(
        query=128,
        key=256,
        key_chunk=1024,
        backward_key=128,
        backward_query=256,
        backward_query_chunk=768,
    )
    calls = kernels(pallas_step(tiles=tiles, **arguments), query, key, value)
    row_bytes, key_bytes = B * T * N * 4, B * S * K * 4

    forward = calls["flash_forward"].params["cost_estimate"]
    scores = B * N * visited_scores(T, S, tiles.query, tiles.key, **arguments)
    assert forward.transcendentals == scores
    assert forward.flops == 2 * scores * (H + Hv)
    assert forward.bytes_accessed == row_bytes * (H + Hv + 1) + key_bytes * (H + Hv)

    backward = calls["flash_backward"].params["cost_estimate"]
    scores = B * N * visited_scores(T, S, tiles.backward_query, tiles.backward_key, **arguments)
    assert backward.transcendentals == scores
    assert backward.flops == 2 * scores * (3 * H + 2 * Hv)
    # Query, its gradient, output gradient, logsumexp and delta; keys once for each query head.
    assert backward.bytes_accessed == (
        row_bytes * (2 * H + Hv + 2) + key_bytes * (N // K + 1) * (H + Hv)
    )


def test_case_19_cost_of_traced_masks_is_an_upper_bound():
    def flops(**arguments):
        calls = kernels(pallas_step(tiles=SMALL_TILES, **arguments), *abstract_qkv(1, 512, 512))
        return [call.params["cost_estimate"].flops for call in calls.values()]

    segments = np.zeros((1, 512), np.int32)
    assert flops(segment_ids=SegmentIds(segments, segments), is_causal=True) == flops(
        is_causal=True
    )
    assert flops(positions=Positions(segments, segments), is_causal=True) == flops()
    assert flops(is_causal=True) < flops()


@pytest.mark.tpu_compile
def test_case_19_xla_sees_the_cost():
    arrays = abstract_qkv(1, 2048, 2048, 2, 2, 128, jnp.bfloat16)

    def flops(is_causal):
        program = aot.compile_for_tpu(pallas_step(is_causal=is_causal, tiles=SMALL_TILES), *arrays)
        return program.compiled.cost_analysis()["flops"]

    # 16 by 16 tiles; the five products of the backward pass and the two of the forward pass.
    products = 7 * 2 * 2 * 2048**2 * 128
    assert products <= flops(is_causal=False) <= 1.01 * products
    assert products * 17 / 32 <= flops(is_causal=True) <= 1.02 * products * 17 / 32


# --- Which implementation runs ---


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"'flash' is not known; use None or one of \('pallas'"):
        dot_product_attention(*draw_qkv(), implementation="flash")


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_tiles_are_not_ignored(implementation):
    with pytest.raises(ValueError, match=rf'implementation="{implementation}" has none'):
        dot_product_attention(*draw_qkv(), tiles=SMALL_TILES, implementation=implementation)


def test_pallas_on_cpu_is_an_error():
    attend = functools.partial(dot_product_attention, implementation="pallas")
    for call in (attend, jax.jit(attend)):
        with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
            call(*draw_qkv())


def test_pallas_says_all_that_it_lacks():
    arrays = draw_qkv(dtype=np.float16, H=2**15)
    reasons = ("dtype float16", "no tiles fit")
    with pytest.raises(NotImplementedError, match=".*".join(reasons)) as caught:
        jax.eval_shape(functools.partial(dot_product_attention, implementation="pallas"), *arrays)
    assert 'Use implementation="xla"' in str(caught.value)


def test_none_on_cpu_says_nothing_and_takes_xla():
    """Warnings are errors here; on a CPU the kernels are no option to begin with."""
    arguments = {"logits_soft_cap": 5.0, "is_causal": True}
    np.testing.assert_array_equal(
        dot_product_attention(*draw_qkv(), **arguments),
        dot_product_attention(*draw_qkv(), **arguments, implementation="xla"),
    )


@pytest.mark.tpu_compile
def test_none_takes_the_kernels_on_tpu():
    program = aot.compile_for_tpu(dot_product_attention, *abstract_qkv())
    assert program.kernels == ("flash_forward",)


OPTIONS = {
    "bias": {"bias": np.zeros((64, 64), np.float32)},
    "bias=Alibi": {"bias": Alibi(np.ones(4, np.float32))},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "dropout": {"dropout": Dropout(rate=0.1, key=jax.random.key(0))},
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", OPTIONS)
def test_none_takes_the_kernels_with_every_option(name):
    """The bias' own pass is left out where its gradient is not asked for."""

    def step(query, key, value):
        output, vjp = jax.vjp(
            functools.partial(dot_product_attention, **OPTIONS[name]), query, key, value
        )
        return vjp(output)

    program = aot.compile_for_tpu(step, *abstract_qkv())
    assert sorted(program.kernels) == ["flash_backward", "flash_forward"]


@pytest.mark.tpu_compile
def test_a_head_that_is_too_large_for_the_kernels_takes_xla():
    arrays = abstract_qkv(T=16, S=16, H=2**15)
    with pytest.warns(UserWarning, match=r"no tiles fit \d+ bytes of VMEM at head size 32768"):
        assert aot.compile_for_tpu(dot_product_attention, *arrays).kernels == ()
    assert jax.eval_shape(jax.jit(dot_product_attention), *arrays).shape == arrays[0].shape
    with pytest.raises(NotImplementedError, match="cannot take this call: no tiles fit"):
        jax.eval_shape(functools.partial(dot_product_attention, implementation="pallas"), *arrays)


@pytest.mark.tpu_compile
def test_case_10_float16_takes_xla_with_a_warning():
    with pytest.warns(UserWarning, match="dtype float16 has no TPU kernel") as caught:
        program = aot.compile_for_tpu(
            lambda q, k, v: dot_product_attention(q, k, v), *abstract_qkv(dtype=jnp.float16)
        )
    assert program.kernels == ()
    assert caught[0].filename == __file__  # it points at the caller


# --- Inside flax's own modules (20) ---


def nnx_layer(attention, **arguments):
    return flax.nnx.MultiHeadAttention(
        num_heads=4,
        in_features=16,
        qkv_features=32,
        decode=False,
        attention_fn=attention,
        rngs=flax.nnx.Rngs(0),
        **arguments,
    )


FLAX_MASKS = {
    "none": None,
    "float32": flax.nnx.make_causal_mask(np.ones((3, 6))),
    "bool": flax.nnx.make_causal_mask(np.ones((3, 6)), dtype=bool),
    "int32, padding": flax.nnx.make_attention_mask(
        np.ones((3, 6)), np.arange(6) < np.array([[6], [4], [1]]), dtype=np.int32
    ),
}


@pytest.mark.parametrize("mask", FLAX_MASKS)
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_case_20_in_flax_nnx(mask, dtype):
    x = draw(3, 6, 16)
    ours, theirs = (
        nnx_layer(attention, dtype=dtype)(x, mask=FLAX_MASKS[mask])
        for attention in (attention_fn, flax.nnx.dot_product_attention)
    )
    assert ours.dtype == theirs.dtype
    assert_trees_close(ours, theirs, 2e-6 if dtype is None else 2e-2)


@pytest.mark.parametrize("mask", FLAX_MASKS)
def test_case_20_in_flax_linen(mask):
    x = draw(3, 6, 16)
    layers = [
        flax.linen.MultiHeadDotProductAttention(
            num_heads=4, qkv_features=32, attention_fn=attention
        )
        for attention in (attention_fn, flax.linen.dot_product_attention)
    ]
    variables = layers[0].init(jax.random.key(0), x)
    ours, theirs = (layer.apply(variables, x, mask=FLAX_MASKS[mask]) for layer in layers)
    assert_trees_close(ours, theirs, 2e-6)


def test_case_20_causal_in_flax_nnx():
    x = draw(3, 6, 16)
    ours, theirs = (
        nnx_layer(attention)(x, is_causal=True)
        for attention in (attention_fn, flax.nnx.dot_product_attention)
    )
    assert_trees_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_case_20_any_leading_axes(leading):
    query, key, value = (draw(*leading, 6, 4, 8, seed=i) for i in range(3))
    shapes = [(6, 6), (4, 6, 6), (*leading, 4, 6, 6), (*[1] * len(leading), 4, 6, 6)]
    if leading:
        shapes += [(2, 1, 4, 6, 6), (3, 4, 6, 6)]

    def in_full(x):  # jax.nn folds the leading axes, and then no longer broadcasts each
        return np.broadcast_to(x, (*leading, 4, 6, 6))

    for shape in shapes:
        mask, bias = draw(*shape) + 3 * np.eye(6) > 0, draw(*shape, seed=1)
        assert_trees_close(
            jax.jit(attention_fn)(query, key, value, bias, mask),
            flax.nnx.dot_product_attention(query, key, value, *map(in_full, (bias, mask))),
            2e-6,
        )


def test_case_20_dropout():
    x = np.broadcast_to(draw(1, 64, 16), (2, 64, 16))

    def layer(**arguments):
        return nnx_layer(attention_fn, dropout_rate=0.5, **arguments)(x, deterministic=False)

    without = nnx_layer(attention_fn)(x)
    deterministic = nnx_layer(attention_fn, dropout_rate=0.5)(x, deterministic=True)
    np.testing.assert_array_equal(deterministic, without)
    shared, own = layer(broadcast_dropout=True), layer(broadcast_dropout=False)
    assert relative_error(shared, without) > 0.1
    np.testing.assert_array_equal(shared[0], shared[1])
    assert relative_error(own[0], own[1]) > 0.1
    np.testing.assert_array_equal(own, layer(broadcast_dropout=False))


def test_case_20_dropout_in_flax_linen():
    x = draw(2, 64, 16)
    layer = flax.linen.MultiHeadDotProductAttention(
        num_heads=4, attention_fn=attention_fn, dropout_rate=0.5
    )
    variables = layer.init(jax.random.key(0), x, deterministic=True)
    without = layer.apply(variables, x, deterministic=True)
    dropped = [
        layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    ]
    assert relative_error(dropped[0], without) > 0.1
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert relative_error(dropped[0], dropped[2]) > 0.1


def test_dropout_keeps_the_mean():
    """Uniform weights over 512 keys of value 1: the kept share, doubled."""
    zeros, ones = np.zeros((2, 512, 4, 8), np.float32), np.ones((2, 512, 4, 8), np.float32)
    output = attention_fn(
        zeros, zeros, ones, dropout_rng=jax.random.key(0), dropout_rate=0.5, broadcast_dropout=False
    )
    shares = output[..., 0]
    deviation = 512**-0.5  # of one row: doubled coin, 512 of them
    assert abs(shares.mean() - 1) < 4 * deviation / shares.size**0.5
    assert 0.9 * deviation < shares.std() < 1.1 * deviation


def test_case_20_weights_cannot_be_sown():
    with pytest.raises(NotImplementedError, match=r"sow_weights=True.*attention_fn=flax\.nnx"):
        nnx_layer(attention_fn)(draw(3, 6, 16), sow_weights=True)
    layer = flax.linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match="sow_weights=True"):
        layer.init(jax.random.key(0), draw(3, 6, 16), sow_weights=True)


def test_attention_fn_promotes_dtypes():
    query, key, value = draw_qkv()
    output = attention_fn(query.astype(jnp.bfloat16), key, value)
    assert output.dtype == jnp.float32
    assert attention_fn(query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_attention_fn_takes_rules_alibi_and_lists():
    query, key, value = draw(3, 2, 5, 4, 8)
    expected = dot_product_attention(
        query, key, value, Alibi(jnp.ones(4)), lambda i, j: i >= j, implementation="reference"
    )
    arrays = (query.tolist(), key.tolist(), value.tolist())
    output = attention_fn(*arrays, bias=Alibi(jnp.ones(4)), mask=lambda i, j: i >= j)  # pyright: ignore
    assert_trees_close(output, expected, 2e-6)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((5, 8), {}, r"query has shape \(5, 8\); \[batch\.\.\., positions"),
        (
            (2, 3, 5, 4, 8),
            {"mask": np.ones((3, 2, 1, 5, 5))},
            r"mask has the batch axes \(3, 2\) .*those of query, \(2, 3\)",
        ),
        ((5, 4, 8), {"deterministic": 3}, "deterministic=3 must be True or False"),
        ((5, 4, 8), {"dropout_rate": 0.1, "dropout_rng": 3}, "dropout.key=3 is not one"),
    ],
)
def test_attention_fn_says_what_is_wrong(shape, arguments, message):
    x = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        attention_fn(x, x, x, **arguments)


@pytest.mark.parametrize("implementation", [None, "pallas", "xla", "reference"])
def test_an_empty_batch(implementation):
    x = jnp.ones((0, 5, 4, 8))
    bias = jnp.ones((5, 5))

    def attend(x, bias):
        output, logsumexp = dot_product_attention(
            x, x, x, bias, is_causal=True, implementation=implementation, return_residual=True
        )
        assert output.shape == x.shape
        assert logsumexp.shape == x.shape[:-1]
        return output.sum() + logsumexp.sum()

    dx, dbias = jax.grad(attend, (0, 1))(x, bias)
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dbias, 0)
    assert attention_fn(*[jnp.ones((2, 0, 5, 4, 8))] * 3).shape == (2, 0, 5, 4, 8)
