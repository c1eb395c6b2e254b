"""Tile sizes with the least simulated cycles; written by `python -m benchmarks.tune`.

Keys are generation, dtype, head size, and the length that the entry was simulated for.
"""

Table = dict[tuple[str, str, int, int], tuple[int, int]]

FORWARD: Table = {
    ("v5e", "bfloat16", 128, 4096): (2048, 2048),
    ("v5e", "bfloat16", 256, 4096): (2048, 2048),
    ("v5e", "float32", 128, 1024): (512, 256),
    ("v5p", "bfloat16", 128, 4096): (2048, 2048),
    ("v5p", "bfloat16", 256, 4096): (2048, 2048),
    ("v5p", "float32", 128, 1024): (512, 256),
    ("v6e", "bfloat16", 128, 4096): (2048, 2048),
    ("v6e", "bfloat16", 256, 4096): (2048, 2048),
    ("v6e", "float32", 128, 1024): (512, 256),
    ("tpu7x", "bfloat16", 128, 4096): (2048, 2048),
    ("tpu7x", "bfloat16", 256, 4096): (2048, 2048),
    ("tpu7x", "float32", 128, 1024): (512, 256),
}
"""Sizes of `Tiles.query` and `Tiles.key`."""

BACKWARD: Table = {
    ("v5e", "bfloat16", 128, 4096): (1024, 1024),
    ("v5e", "bfloat16", 256, 4096): (1024, 1024),
    ("v5e", "float32", 128, 1024): (512, 512),
    ("v5p", "bfloat16", 128, 4096): (1024, 1024),
    ("v5p", "bfloat16", 256, 4096): (1024, 1024),
    ("v5p", "float32", 128, 1024): (512, 512),
    ("v6e", "bfloat16", 128, 4096): (1024, 1024),
    ("v6e", "bfloat16", 256, 4096): (1024, 1024),
    ("v6e", "float32", 128, 1024): (512, 512),
    ("tpu7x", "bfloat16", 128, 4096): (2048, 2048),
    ("tpu7x", "bfloat16", 256, 4096): (1024, 1024),
    ("tpu7x", "float32", 128, 1024): (512, 256),
}
"""Sizes of `Tiles.backward_key` and `Tiles.backward_query`."""
