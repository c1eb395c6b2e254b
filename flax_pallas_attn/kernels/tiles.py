"""Tile sizes of the flash kernels, by TPU generation, dtype and shape, and the VMEM they take."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax

from flax_pallas_attn.kernels import tile_table
from flax_pallas_attn.masking import Mask

LANES = 128
MOST_SCORES = 1 << 20
"""Scores of a grid step, up to which it takes more heads at once."""
_MIB = 1 << 20

# VMEM of one core in bytes (`pltpu.get_tpu_info`, jax 0.12), by device kind.
_VMEM_BYTES = {
    "TPU v4": 16 * _MIB,
    "TPU v5 lite": 128 * _MIB,
    "TPU v5e": 128 * _MIB,
    "TPU v5": 64 * _MIB,
    "TPU v5p": 64 * _MIB,
    "TPU v6 lite": 128 * _MIB,
    "TPU v6e": 128 * _MIB,
    "TPU7x": 64 * _MIB,
}
_LEAST_VMEM_BYTES = min(_VMEM_BYTES.values())
# What the compiler keeps for itself, and what an estimate may be off by.
_USABLE_VMEM = 0.85

# Whose entries in `tile_table` a generation takes. libtpu does not simulate v4, the most like v5p;
# where none is known the kernels are as on v6e.
_TUNED_AS = {
    None: "v6e",
    "TPU v4": "v5p",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_MOST_RAGGED = 1024
"""Tokens of a tile that may run over the end."""

# Of the generations whose matrix units are not 128 wide (`pltpu.get_tpu_info`, jax 0.12).
_MXU_SIZES = {"TPU v6 lite": 256, "TPU v6e": 256, "TPU7x": 256}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the flash kernels' tiles, in tokens. Multiples of 128.

    Of a mask that is not only causality and window the units that it leaves are listed, whichever
    the tiles: `key` and `backward_query` then count as what a chunk is a multiple of.

    Attributes:
      query: Queries of a forward grid step.
      key: Keys of a step of the loop within it.
      key_chunk: Keys that stand in VMEM at once in the forward kernel; a multiple of `key`.
      backward_key: Keys of a backward grid step.
      backward_query: Queries of a step of the loop within it.
      backward_query_chunk: Queries that stand in VMEM at once in the backward kernel; a multiple
        of `backward_query`.
    """

    query: int
    key: int
    key_chunk: int
    backward_key: int
    backward_query: int
    backward_query_chunk: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size <= 0 or size % LANES:
                raise ValueError(
                    f"tiles.{field.name}={size} must be a positive multiple of {LANES} tokens."
                )
        for chunk, step in (("key_chunk", "key"), ("backward_query_chunk", "backward_query")):
            if getattr(self, chunk) % getattr(self, step):
                raise ValueError(
                    f"tiles.{chunk}={getattr(self, chunk)} must be a multiple of "
                    f"tiles.{step}={getattr(self, step)}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the VMEM of a call depends on.

    Attributes:
      queries: T.
      keys: S.
      head_dim: H.
      value_dim: Hv.
      itemsize: Bytes of an element of query, key and value.
      is_band: Whether the mask is nothing but causality and window, known while tracing.
      pair_bytes: Of what is streamed for each pair of query and key: dense mask and bias.
      token_rows: Of positions and segment ids: 0, 1 or 2.
    """

    queries: int
    keys: int
    head_dim: int
    value_dim: int
    itemsize: int
    is_band: bool
    pair_bytes: int
    token_rows: int


def shape_of(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    bias: jax.Array | None = None,
) -> Shape:
    """The `Shape` of a call with heads-first arrays."""
    of_pairs = [x for x in (mask.dense, bias) if x is not None and x.shape[2] > 1]
    return Shape(
        queries=query.shape[2],
        keys=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        itemsize=query.dtype.itemsize,
        is_band=mask.is_band,
        pair_bytes=sum(1 if x is mask.dense else x.dtype.itemsize for x in of_pairs),
        token_rows=(mask.positions is not None) + (mask.segment_ids is not None),
    )


def tpu_kind() -> str | None:
    """Device kind of the TPU that is compiled for, as far as tracing can know.

    The abstract mesh's device if that is a TPU, else the default device if that is one, else None.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.device_kind.startswith("TPU"):
        return device.device_kind
    if jax.default_backend() == "tpu":
        return jax.devices()[0].device_kind
    return None


BACKWARD_UNIT = 256
"""As `unit`, of the backward kernel: the same for all, by simulation (benchmarks/LOG.md)."""


def unit() -> int:
    """Queries and keys of a unit: what a kernel computes at once, of the tiles that it visits.

    As wide as a matrix unit of the generation compiled for; 256 where none is known.
    """
    kind = tpu_kind()
    return 256 if kind is None else _MXU_SIZES.get(kind, LANES)


def vmem_limit_bytes(estimate: int | None = None) -> int:
    """VMEM that a kernel may use: of the generation compiled for, or of the smallest one.

    What a kernel asks for XLA cannot use for what it keeps in VMEM around it: with an `estimate`
    of the need, no more than an eighth beyond it and room for what the compiler spills.
    """
    limit = int(_VMEM_BYTES.get(tpu_kind() or "", _LEAST_VMEM_BYTES) * _USABLE_VMEM)
    return limit if estimate is None else min(limit, estimate + estimate // 8 + 4 * _MIB)


def forward_vmem_bytes(tiles: Tiles, shape: Shape, heads: int = 1) -> int:
    """Estimate for the forward kernel: pipelined blocks twice, scratch, live score tiles.

    Args:
      tiles: Its tiles.
      shape: What it sees.
      heads: Query heads of a grid step.
    """
    width = _lanes(shape.head_dim) + _lanes(shape.value_dim)
    blocks = (tiles.query + tiles.key_chunk) * width * shape.itemsize
    blocks += shape.pair_bytes * tiles.query * tiles.key_chunk
    blocks = heads * blocks + _token_bytes(shape, tiles.query, tiles.key_chunk)
    scores = min(unit(), tiles.query) * min(unit(), tiles.key) * 4
    # Products that were computed ahead, what is in the softmax, the scaled query and the output (of
    # float32 operands the compiler keeps parts in bfloat16 besides).
    live = 12 * scores + heads * tiles.query * width * 2 * shape.itemsize
    return 2 * blocks + heads * tiles.query * (shape.value_dim + 16) * 4 + live


def backward_vmem_bytes(tiles: Tiles, shape: Shape, keys_in_vmem: int, heads: int = 1) -> int:
    """Estimate for the backward kernel with key gradients of `keys_in_vmem` keys kept in VMEM.

    As `forward_vmem_bytes`.
    """
    head, value = _lanes(shape.head_dim), _lanes(shape.value_dim)
    chunk, key = tiles.backward_query_chunk, tiles.backward_key
    rows = 2 * 8 * chunk * 4  # logsumexp and delta
    blocks = chunk * (2 * head + value) * shape.itemsize + rows
    blocks += 2 * key * (head + value) * max(shape.itemsize, 4)
    blocks = heads * (blocks + shape.pair_bytes * chunk * key) + _token_bytes(shape, chunk, key)
    scratch = chunk * (head * 4 + (head + value) * shape.itemsize)
    scratch += (keys_in_vmem + 2 * key) * (head + value) * 4
    live = 12 * min(BACKWARD_UNIT, key) * min(BACKWARD_UNIT, tiles.backward_query) * 4
    live += (key + tiles.backward_query) * (head + value) * shape.itemsize  # being transposed
    return 2 * blocks + heads * scratch + live


def forward_heads(tiles: Tiles, shape: Shape, heads: int, group: int) -> int:
    """Query heads of a grid step of the forward kernel: several where each is short.

    A factor or a multiple of the group: those of one key head, or all of some key heads.

    Args:
      tiles: Its tiles.
      shape: What it sees.
      heads: Query heads.
      group: Query heads that share a key head.
    """
    is_short = shape.queries <= tiles.query and shape.keys <= tiles.key_chunk
    most = MOST_SCORES // (tiles.query * tiles.key_chunk) if is_short else 1
    vmem_bytes = functools.partial(forward_vmem_bytes, tiles, shape)
    return _heads_in_step(most, heads, group, vmem_bytes)


def backward_heads(tiles: Tiles, shape: Shape, heads: int, group: int) -> int:
    """Likewise of the backward kernel."""
    chunk, key = tiles.backward_query_chunk, tiles.backward_key
    is_short = shape.queries <= chunk and shape.keys <= key
    most = MOST_SCORES // (chunk * key) if is_short else 1
    vmem_bytes = functools.partial(backward_vmem_bytes, tiles, shape, key)
    return _heads_in_step(most, heads, group, vmem_bytes)


def _heads_in_step(most: int, heads: int, group: int, vmem_bytes) -> int:
    fit = [
        count
        for count in range(2, min(most, heads) + 1)
        if heads % count == 0
        and (count % group == 0 or group % count == 0)
        and vmem_bytes(heads=count) <= vmem_limit_bytes()
    ]
    return max(fit, default=1)


def key_gradients_fit(tiles: Tiles, shape: Shape) -> bool:
    """Whether the gradients of all keys of a head fit in VMEM while queries go by."""
    keys = pad_to(shape.keys, tiles.backward_key)
    return backward_vmem_bytes(tiles, shape, keys) <= vmem_limit_bytes()


def backward_keys_in_vmem(tiles: Tiles, shape: Shape, group: int) -> int:
    """Keys of a head whose gradients the backward kernel keeps in VMEM, beside those it works on.

    Args:
      tiles: Its tiles.
      shape: What it sees.
      group: Query heads that share a key head.
    """
    is_summed = group * -(-shape.queries // tiles.backward_query_chunk) > 1
    if is_summed and key_gradients_fit(tiles, shape):
        return pad_to(shape.keys, tiles.backward_key)
    return tiles.backward_key


def check_fit(tiles: Tiles, kernel: str, need_bytes: int) -> None:
    """Refuses a caller's tiles that do not fit the generation compiled for, where that is known.

    Args:
      tiles: The caller's.
      kernel: "forward" or "backward".
      need_bytes: VMEM that it needs with them.

    Raises:
      ValueError: They do not fit.
    """
    kind, limit = tpu_kind(), vmem_limit_bytes()
    if kind is None or need_bytes <= limit:
        return
    names = {
        "forward": ("query", "key", "key_chunk"),
        "backward": ("backward_key", "backward_query", "backward_query_chunk"),
    }[kernel]
    sizes = ", ".join(f"{name}={getattr(tiles, name)}" for name in names)
    raise ValueError(
        f"tiles=Tiles({sizes}, ...) do not fit: the {kernel} kernel needs some {need_bytes:,} "
        f"bytes of VMEM with them, {kind} has {limit:,} for it. Choose smaller ones, "
        f"{names[-1]} first, or leave tiles out."
    )


def default_tiles(shape: Shape) -> Tiles:
    """Tiles that fit the generation compiled for.

    Of the sizes in `tile_table` and halves of them, the first that fit; a chunk is all that there
    is or as much as fits.

    Raises:
      NotImplementedError: None fit: the head size is too large. The text is a reason, to be joined
        with others.
    """
    forward = _fitting(
        ("query", "key", "key_chunk"),
        _pairs(tile_table.FORWARD, shape),
        (shape.queries, shape.keys),
        unit(),
        forward_vmem_bytes,
        shape,
    )
    backward = _fitting(
        ("backward_key", "backward_query", "backward_query_chunk"),
        _pairs(tile_table.BACKWARD, shape),
        (shape.keys, shape.queries),
        BACKWARD_UNIT,
        functools.partial(backward_vmem_bytes, keys_in_vmem=0),
        shape,
    )
    return Tiles(**forward, **backward)


def _pairs(table: tile_table.Table, shape: Shape) -> list[tuple[int, int]]:
    """Sizes to try, of the axis that walks and of the other: the fastest by simulation first."""
    if shape.is_band:
        own, other = _tuned(table, shape)
    else:
        # Units that are listed cost no more to compile the larger the tile is that they are in.
        own, other = 512 if shape.pair_bytes else 4096, 512
    sizes = [own >> n for n in range(own.bit_length()) if own >> n >= LANES]
    if shape.is_band and any(pad_to(n, unit()) % own for n in (shape.queries, shape.keys)):
        # A tile that runs over the end is written out once more: twice the time to compile.
        sizes = [size for size in sizes if size <= _MOST_RAGGED]
    return [(size, min(size, other)) for size in sizes]


def _tuned(table: tile_table.Table, shape: Shape) -> tuple[int, int]:
    """Entry of this generation, dtype, and the next head size and length, or the largest."""
    generation = _TUNED_AS.get(tpu_kind(), _TUNED_AS[None])
    dtype = "bfloat16" if shape.itemsize <= 2 else "float32"
    head_size, length = max(shape.head_dim, shape.value_dim), max(shape.queries, shape.keys)

    def distance(key):
        sizes = zip(key[2:], (head_size, length), strict=True)
        return [(entry < asked, abs(entry - asked)) for entry, asked in sizes]

    return table[min((key for key in table if key[:2] == (generation, dtype)), key=distance)]


def _fitting(
    names: tuple[str, str, str],
    pairs: list[tuple[int, int]],
    tokens: tuple[int, int],
    unit: int,
    vmem_bytes: Callable[[Tiles, Shape], int],
    shape: Shape,
) -> dict[str, int]:
    """Sizes of the first pair that fits, with its largest chunk.

    A chunk is all that there is or at least 4 tiles, but for the last pair.

    Args:
      names: Fields of `Tiles`: of the axis that walks, of the other, and of the other's chunk.
      pairs: Sizes of both to try.
      tokens: There are of both.
      unit: Of the kernel.
      vmem_bytes: That it needs.
      shape: What it sees.
    """
    smallest = {field.name: LANES for field in dataclasses.fields(Tiles)}
    limit = vmem_limit_bytes()
    for pair in pairs:
        own, other = (
            min(size, _whole_units(n, unit)) for size, n in zip(pair, tokens, strict=True)
        )
        if shape.is_band:
            # What a band does to each unit is known where a tile that walks holds whole others.
            other = math.gcd(own, other)
        chunk = pad_to(tokens[1], other)
        least = other if pair is pairs[-1] else min(chunk, 4 * other)
        while chunk >= least:
            sizes = dict(zip(names, (own, other, chunk), strict=True))
            if vmem_bytes(Tiles(**smallest | sizes), shape) <= limit:
                return sizes
            chunk = pad_to(chunk // 2, other) if chunk > other else 0
    raise NotImplementedError(
        f"no tiles fit {limit} bytes of VMEM at head size {shape.head_dim} and value head size "
        f"{shape.value_dim} in {8 * shape.itemsize} bits"
    )


def pad_to(size: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-size // multiple) * multiple


def _whole_units(tokens: int, unit: int) -> int:
    """The least tile that holds so many: a multiple of the unit, or a power of two within it."""
    if tokens > unit:
        return pad_to(tokens, unit)
    return max(LANES, 1 << (tokens - 1).bit_length())


def _token_bytes(shape: Shape, queries: int, keys: int) -> int:
    """Of blocks of positions and segment ids: a query's in a lane, a key's over all lanes."""
    return (8 * queries + LANES * shape.token_rows * keys) * 4 if shape.token_rows else 0


def _lanes(size: int) -> int:
    return pad_to(size, LANES)
