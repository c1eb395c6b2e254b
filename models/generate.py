"""Generating text: the prompts in one call, then one token per sequence and step.

Keys and values live in a paged cache. Prompts of any lengths are laid one after another, without
padding between them, so that one call reads them all.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from flax import nnx

from flax_pallas_attn.paged import PageAllocator, PagedKVCache
from models.gpt import GPT
from models.sampling import Sampling, sample

DEFAULT_PAGE_SIZE = 16
DEFAULT_SAMPLING = Sampling()


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    num_pages: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> list[list[int]]:
    """Continues each prompt; arguments as in `stream`.

    Returns:
      The new tokens of each prompt, without the stop token.

    >>> from flax import nnx
    >>> from models.config import PRESETS
    >>> from models.sampling import GREEDY
    >>> model = GPT(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> [new] = generate(model, [[72, 105]], max_new_tokens=3, sampling=GREEDY)
    >>> len(new)
    3
    """
    sequences: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        num_pages=num_pages,
        page_size=page_size,
    ):
        for sequence, token in zip(sequences, tokens, strict=True):
            if token is not None:
                sequence.append(token)
    return sequences


def stream(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT_SAMPLING,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    num_pages: int | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
) -> Iterator[list[int | None]]:
    """Continues each prompt, one step at a time.

    Args:
      model: With its parameters.
      prompts: Token ids, each prompt at least one: lists, bytes or arrays.
      max_new_tokens: Where to end each sequence that meets no stop token.
      sampling: How tokens are drawn; by default from the model's own distribution.
      seed: Of the draws: the same seed gives the same tokens.
      stop_tokens: Token ids that end a sequence; they are not part of it.
      num_pages: Pages of the cache; None for enough to hold the sequences at their longest.
      page_size: Tokens per page.

    Yields:
      Each step, the new token of each prompt, None once it has ended; until all have.

    Raises:
      ValueError: No prompt, an empty one, what is no token id or outside the vocabulary, a
        sequence that would outgrow the model's context, or another argument out of range.
      OutOfPagesError: `num_pages` pages cannot hold the sequences at their longest.
    """
    _check_options(max_new_tokens, sampling, seed)
    rows = _check_prompts(model, prompts, max_new_tokens)
    stop_ids = _token_ids("stop_tokens", stop_tokens)
    if page_size < 1:
        raise ValueError(f"page_size={page_size} must be at least 1 token.")
    # The last token of a sequence is never written: nothing comes after it.
    longest = [len(row) + max_new_tokens - 1 for row in rows]
    if num_pages is None:
        num_pages = _few_sizes(sum(-(-tokens // page_size) for tokens in longest))
    allocator = PageAllocator(num_pages=num_pages, page_size=page_size)
    page_table = np.zeros((len(rows), -(-model.config.context_tokens // page_size)), np.int32)
    for row, tokens in zip(page_table, longest, strict=True):
        pages = allocator.grow([], num_tokens=tokens)
        row[: len(pages)] = pages
    cache = model.create_cache(num_pages=num_pages, page_size=page_size)
    return _steps(model, rows, cache, page_table, max_new_tokens, sampling, seed, stop_ids)


def _steps(
    model: GPT,
    prompts: list[np.ndarray],
    cache: PagedKVCache,
    page_table: np.ndarray,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: np.ndarray,
) -> Iterator[list[int | None]]:
    graphdef, parameters = nnx.split(model)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.zeros(_few_sizes(starts[-1]), np.int32)
    flat[: starts[-1]] = np.concatenate(prompts)

    key = jax.random.key(seed)
    tokens, cache = append_and_sample(
        graphdef,
        parameters,
        cache,
        flat,
        page_table,
        lengths,
        starts,
        starts[1:] - 1,
        jax.random.fold_in(key, 0),
        sampling=sampling,
    )
    ended = np.zeros(len(prompts), bool)
    every = np.arange(len(prompts) + 1, dtype=np.int32)
    for step in range(1, max_new_tokens + 1):
        drawn = np.asarray(tokens)
        ended |= np.isin(drawn, stop_ids)
        if ended.all():
            return
        yield [None if over else int(token) for token, over in zip(drawn, ended, strict=True)]
        if step == max_new_tokens:
            return
        # A sequence that has ended goes on in its own pages, unseen, until all have: the shapes
        # stay, and so does the compiled step.
        tokens, cache = append_and_sample(
            graphdef,
            parameters,
            cache,
            tokens,
            page_table,
            lengths + step,
            every,
            every[:-1],
            jax.random.fold_in(key, step),
            sampling=sampling,
        )


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling"), donate_argnames="cache")
def append_and_sample(
    graphdef: nnx.GraphDef[GPT],
    parameters: nnx.State,
    cache: PagedKVCache,
    tokens: jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
    logits_at: jax.Array,
    key: jax.Array,
    *,
    sampling: Sampling,
) -> tuple[jax.Array, PagedKVCache]:
    """Appends tokens to the cache and draws the next one after each row in `logits_at`.

    Arguments and shapes as in `GPT.paged`; the cache is donated.
    """
    logits, cache = nnx.merge(graphdef, parameters).paged(
        tokens,
        cache,
        page_table=page_table,
        kv_lengths=kv_lengths,
        query_starts=query_starts,
        logits_at=logits_at,
    )
    return sample(logits, key, sampling), cache


def _few_sizes(size: int) -> int:
    """The next power of two: what is padded to it is compiled for few sizes."""
    return 1 << (int(size) - 1).bit_length()


def _check_options(max_new_tokens: int, sampling: Sampling, seed: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1.")
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling={sampling!r} must be a Sampling; GREEDY is one.")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must be between 0 and {2**32 - 1}.")


def _check_prompts(
    model: GPT, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> list[np.ndarray]:
    if len(prompts) == 0:
        raise ValueError("prompts is empty; give at least one prompt.")
    rows = [_token_ids(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
    context_tokens, vocab_size = model.config.context_tokens, model.config.vocab_size
    for index, prompt in enumerate(rows):
        if not len(prompt):
            raise ValueError(
                f"prompts[{index}] is empty; give at least one token, such as a newline."
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompts[{index}] has token ids from {prompt.min()} to {prompt.max()}; the model "
                f"knows 0 to {vocab_size - 1}."
            )
        if len(prompt) >= context_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens, which leaves no room for new ones in "
                f"the model's context_tokens={context_tokens}; shorten the prompt."
            )
        if len(prompt) + max_new_tokens > context_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens, and max_new_tokens={max_new_tokens} "
                f"would go past the model's context_tokens={context_tokens}; shorten the prompt, "
                f"or ask for at most {context_tokens - len(prompt)} tokens."
            )
    return rows


def _token_ids(name: str, ids: Sequence[int]) -> np.ndarray:
    """One row of ids as an array; bytes are ids too."""
    row = np.asarray(list(ids) if isinstance(ids, bytes) else ids)
    if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
        raise ValueError(
            f"{name} has shape {row.shape} and dtype {row.dtype}; give a row of token ids, "
            "which are whole numbers: of a text, for a model of bytes, text.encode()."
        )
    return row.astype(np.int64)
