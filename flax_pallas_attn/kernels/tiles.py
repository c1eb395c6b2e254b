"""Tile sizes of the flash kernels, by TPU generation, dtype and shape, and the VMEM they take."""

import dataclasses

import jax

from flax_pallas_attn.masking import Mask

LANES = 128
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Sizes of the flash kernels' tiles, in tokens. Multiples of 128.

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
      has_dense: Whether a dense mask is streamed.
    """

    queries: int
    keys: int
    head_dim: int
    value_dim: int
    itemsize: int
    has_dense: bool


def shape_of(query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask) -> Shape:
    """The `Shape` of a call with heads-first arrays."""
    return Shape(
        queries=query.shape[2],
        keys=key.shape[2],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        itemsize=query.dtype.itemsize,
        has_dense=mask.dense is not None,
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


def vmem_limit_bytes() -> int:
    """VMEM that a kernel may use: of the generation compiled for, or of the smallest one."""
    return int(_VMEM_BYTES.get(tpu_kind(), _LEAST_VMEM_BYTES) * _USABLE_VMEM)


def forward_vmem_bytes(tiles: Tiles, shape: Shape) -> int:
    """Estimate for the forward kernel: pipelined blocks twice, scratch, live score tiles."""
    width = _lanes(shape.head_dim) + _lanes(shape.value_dim)
    blocks = (tiles.query + tiles.key_chunk) * width * shape.itemsize
    if shape.has_dense:
        blocks += tiles.query * tiles.key_chunk
    return 2 * blocks + tiles.query * shape.value_dim * 4 + 5 * tiles.query * tiles.key * 4


def backward_vmem_bytes(tiles: Tiles, shape: Shape, keys_in_vmem: int) -> int:
    """Estimate for the backward kernel with key gradients of `keys_in_vmem` keys kept in VMEM."""
    head, value = _lanes(shape.head_dim), _lanes(shape.value_dim)
    chunk, key = tiles.backward_query_chunk, tiles.backward_key
    rows = 2 * 8 * chunk * 4  # logsumexp and delta
    blocks = chunk * (2 * head + value) * shape.itemsize + rows
    blocks += 2 * key * (head + value) * max(shape.itemsize, 4)
    if shape.has_dense:
        blocks += chunk * key
    scratch = chunk * head * (4 + shape.itemsize) + (keys_in_vmem + 2 * key) * (head + value) * 4
    return 2 * blocks + scratch + 6 * key * tiles.backward_query * 4


def key_gradients_fit(tiles: Tiles, shape: Shape) -> bool:
    """Whether the gradients of all keys of a head fit in VMEM while queries go by."""
    keys = pad_to(shape.keys, tiles.backward_key)
    return backward_vmem_bytes(tiles, shape, keys) <= vmem_limit_bytes()


def default_tiles(shape: Shape) -> Tiles:
    """Tiles that fit the generation compiled for: the largest chunk, then the largest tile."""
    limit = vmem_limit_bytes()
    largest = 512 if shape.itemsize <= 2 else 256
    query = min(largest, pad_to(shape.queries, LANES))
    key = min(largest, pad_to(shape.keys, LANES))
    tiles = Tiles(
        query=query,
        key=key,
        key_chunk=pad_to(shape.keys, key),
        backward_key=key,
        backward_query=query,
        backward_query_chunk=pad_to(shape.queries, query),
    )
    while forward_vmem_bytes(tiles, shape) > limit:
        tiles = _smaller(tiles, "key_chunk", ("key", "query"))
    while backward_vmem_bytes(tiles, shape, 0) > limit:
        tiles = _smaller(tiles, "backward_query_chunk", ("backward_query", "backward_key"))
    return tiles


def pad_to(size: int, multiple: int) -> int:
    """The next multiple of `multiple`."""
    return -(-size // multiple) * multiple


def _smaller(tiles: Tiles, chunk: str, steps: tuple[str, str]) -> Tiles:
    step, other = steps
    size = getattr(tiles, step)
    if getattr(tiles, chunk) > 4 * size:
        return dataclasses.replace(tiles, **{chunk: pad_to(getattr(tiles, chunk) // 2, size)})
    if size > LANES or getattr(tiles, other) > LANES:
        half = pad_to(size // 2, LANES)
        return dataclasses.replace(
            tiles,
            **{step: half, chunk: 4 * half, other: pad_to(getattr(tiles, other) // 2, LANES)},
        )
    if getattr(tiles, chunk) > size:
        return dataclasses.replace(tiles, **{chunk: size})
    raise NotImplementedError(
        f"No tiles of the flash kernel fit {vmem_limit_bytes()} bytes of VMEM: the head size is "
        'too large. Use implementation="xla".'
    )


def _lanes(size: int) -> int:
    return pad_to(size, LANES)
