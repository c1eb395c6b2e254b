"""That the conformance suite can fail: it rejects wrong implementations, and mutations of ours."""

import dataclasses
import functools
import importlib
import pathlib
import shutil
import sys
import types

import pytest

import flax_pallas_attn
from tests import conformance, sabotage
from tests.test_flash import TILES

PACKAGE = pathlib.Path(flax_pallas_attn.__file__).parent


def is_rejected(attend, *, compiled: bool, look_first: str = "", errors=AssertionError, **which):
    """Whether a check fails; those with `look_first` in their name come first, to save time."""
    for check in sorted(
        conformance.checks(**which), key=lambda check: look_first not in check.name
    ):
        try:
            check(attend, compiled=compiled)
        except errors:
            return True
    return False


@pytest.mark.parametrize("name", sabotage.ALL)
def test_what_is_wrong_is_rejected(name):
    attend, look_first = sabotage.ALL[name]
    assert is_rejected(attend, compiled=False, look_first=look_first)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One token of a source file, replaced.

    Attributes:
      file: In the package.
      old: Occurs once in the file.
      new: What to put in its place.
      look_first: In the names of the checks that are most likely to notice.
    """

    file: str
    old: str
    new: str
    look_first: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old} -> {self.new}"


BLOCKWISE = [
    Mutation("blockwise.py", "jnp.maximum(greatest, scores", "jnp.minimum(greatest, scores"),
    Mutation("blockwise.py", "total * fade + weights", "total / fade + weights"),
    Mutation("blockwise.py", "jnp.exp(greatest - base)", "jnp.exp(greatest + base)"),
    Mutation("blockwise.py", "jnp.exp(scores - base", "jnp.exp(scores + base"),
    Mutation("blockwise.py", "base + jnp.log(total)", "base - jnp.log(total)"),
    Mutation("blockwise.py", "jnp.maximum(base, sinks)", "jnp.minimum(base, sinks)", "sink"),
    Mutation("blockwise.py", ".sum(-1) - logsumexp_gradient", ".sum(-1) + logsumexp_gradient"),
    Mutation("blockwise.py", "lse_tile[:, :, None]), 0)", "lse_tile[:, :, None]), 1)"),
    Mutation("blockwise.py", "dp - offset_tile", "dp + offset_tile"),
    Mutation("blockwise.py", "ds *= 1 - jnp", "ds *= 1 + jnp", "soft cap"),
    Mutation("blockwise.py", "dk_tile * plan.scale", "dk_tile / plan.scale"),
    Mutation("blockwise.py", "(dq, 2, -1) * plan.scale", "(dq, 2, -1) / plan.scale"),
    Mutation("logits.py", "0, -jnp.exp(sinks", "0, +jnp.exp(sinks", "sink"),
    Mutation("blockwise.py", "weights / (1 - logits", "weights / (1 + logits", "dropout"),
    Mutation("blockwise.py", "x / (1 - logits", "x / (1 + logits", "dropout"),
    Mutation("blockwise.py", "key, query) * self.plan", "key, query) / self.plan"),
    Mutation("blockwise.py", "tile.sum(shared", "tile.max(shared", "bias"),
    Mutation("blockwise.py", "visible & is_finite", "visible | is_finite", "bias"),
    Mutation("blockwise.py", "i * self.plan.query_size + jnp", "i * self.plan.key_size + jnp"),
    Mutation("blockwise.py", "stop=self.keys if", "stop=self.queries if"),
    Mutation(
        "blockwise.py", "before + span.stop - span.full_stop", "before + span.stop + span.full_stop"
    ),
    Mutation("blockwise.py", "n < before", "n <= before"),
    Mutation("blockwise.py", "span.full_start.max(0)", "span.full_start.min(0)", "segments"),
    Mutation("blockwise.py", "span.full_stop.min(0)", "span.full_stop.max(0)", "lengths"),
    Mutation("masking.py", "key.position <= query.position", "key.position < query.position"),
    Mutation(
        "masking.py", "key.position >= query.position", "key.position > query.position", "window"
    ),
    Mutation("masking.py", "query.segment == key", "query.segment >= key", "segments"),
    Mutation("masking.py", "self.key < 0, -2", "self.key < 0, -1", "segments"),
    Mutation("masking.py", "key.index < key.stop", "key.index <= key.stop"),
    Mutation("masking.py", "other_tile(high + 1)", "other_tile(high + 2)", "dropout, offset"),
    Mutation("masking.py", "(size - 1 + high) + 1", "(size - 1 + high) + 0", "causal"),
    Mutation("masking.py", "_clip(other_tile(low)", "_clip(other_tile(-low)", "window"),
    Mutation("masking.py", "full &= least >=", "full &= greatest >=", "segments"),
    Mutation("masking.py", "_minimum(full_stop, tiles - 1)", "_minimum(full_stop, tiles - 0)"),
    Mutation(
        "masking.py",
        "segment.query >= 0, query_size",
        "segment.query >= -1, query_size",
        "segments",
    ),
]

FLASH = [
    Mutation("kernels/flash_forward.py", "jnp.log2(total)) * LN_2", "jnp.log2(total)) / LN_2"),
    Mutation("kernels/flash_forward.py", "lanes] * shrink + sums", "lanes] * shrink - sums"),
    Mutation("kernels/flash_forward.py", "n * step_heads // group", "n * group", "six heads"),
    Mutation("kernels/flash_forward.py", "& is_bad, one", "& is_bad, 0", "nan"),
    Mutation("kernels/online_softmax.py", "(signs & sign) != 0", "(signs & sign) != sign", "nan"),
    Mutation("kernels/walk.py", "_minimum(other + 1, tiles - 1)", "_minimum(other, tiles - 1)"),
    Mutation("kernels/walk.py", "_clip(span.start - first, tiles", "_clip(0, tiles", "window"),
    Mutation("kernels/unit_lists.py", "units(i + 1, is_cut)", "units(i, is_cut)", "segments"),
    Mutation("kernels/unit_lists.py", "where(full, 0, jnp", "where(full, 2, jnp", "segments"),
    Mutation("kernels/flash_forward.py", "walk.key_stop", "walk.query_stop"),
    Mutation("kernels/flash_forward.py", "factor *= shrink", "factor /= shrink", "sinks"),
    Mutation("kernels/flash_backward.py", "(LN_2, 1.0)", "(1.0, 1.0)"),
    Mutation("kernels/flash_backward.py", "own] * scale", "own] / scale"),
    Mutation("kernels/score_tiles.py", "change - delta, 0", "change + delta, 0"),
    Mutation("kernels/score_tiles.py", "self.bias * LOG2_E", "self.bias", "bias"),
    Mutation(
        "kernels/score_tiles.py", "* LOG2_E)\n        scores", ")\n        scores", "soft cap"
    ),
    Mutation("kernels/score_tiles.py", "self.bias != -jnp.inf", "self.bias == self.bias", "bias"),
    Mutation("kernels/score_tiles.py", "kept * rescale, change", "kept, change", "dropout"),
    Mutation("kernels/flash_bias_gradient.py", "sum(axis=1,", "max(axis=1,", "bias"),
    Mutation("kernels/online_softmax.py", "jnp.exp2(scores - shift)", "jnp.exp2(scores + shift)"),
    Mutation("kernels/online_softmax.py", "jnp.exp2(maximum - shift)", "jnp.exp2(shift - maximum)"),
    Mutation(
        "masking.py",
        "key.position <= query.position",
        "key.position < query.position",
        "segments, causal",
    ),
]


def mutated(mutation: Mutation, implementation: str, folder: pathlib.Path):
    """`attend` of a copy of the package in `folder`, with the mutation in it."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    source = (copy / mutation.file).read_text()
    assert source.count(mutation.old) == 1, f"{mutation} no longer fits the source"
    (copy / mutation.file).write_text(source.replace(mutation.old, mutation.new))
    originals = _forget_package()
    sys.path.insert(0, str(folder))
    try:
        attend = importlib.import_module(f"{PACKAGE.name}.{implementation}").attend
        mask_class = importlib.import_module(f"{PACKAGE.name}.masking").Mask
    finally:
        sys.path.remove(str(folder))
        _forget_package()
        sys.modules.update(originals)

    def with_its_own_mask(query, key, value, mask, logits, **options):
        fields = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
        return attend(query, key, value, mask_class(**fields), logits, **options)

    return with_its_own_mask


def _forget_package() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]
    return {name: sys.modules.pop(name) for name in names}


@pytest.mark.parametrize("mutation", BLOCKWISE + FLASH, ids=str)
def test_mutations_fit_the_source(mutation):
    assert (PACKAGE / mutation.file).read_text().count(mutation.old) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mutation", BLOCKWISE, ids=str)
def test_mutations_of_blockwise_are_rejected(mutation, tmp_path):
    attend = functools.partial(mutated(mutation, "blockwise", tmp_path), tiles=(16, 24))
    assert is_rejected(attend, compiled=True, look_first=mutation.look_first, errors=Exception)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", FLASH, ids=str)
def test_mutations_of_the_kernels_are_rejected(mutation, interpret, tmp_path):
    attend = functools.partial(mutated(mutation, "kernels.flash", tmp_path), tiles=TILES)
    assert is_rejected(
        attend,
        compiled=True,
        look_first=mutation.look_first,
        errors=Exception,
        queries=200,
        keys=300,
    )
