"""Which pages of a cache are free, shared or kept for a prefix: bookkeeping on the host."""

import collections
import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Sequence

import numpy as np


class OutOfPagesError(RuntimeError):
    """Fewer pages can be had than were asked for. Nothing was changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writable:
    """What makes the pages of a sequence safe to write.

    Attributes:
      pages: All its pages, those that it shared replaced.
      copies: `(from, to)` of each replaced page: to be copied in the cache before it is written
        (`PagedKVCache.copy_pages`).
    """

    pages: list[int]
    copies: list[tuple[int, int]]


class PageAllocator:
    """Hands out page ids of a `PagedKVCache`, counts who holds them, and finds prefixes again.

    A page is held by as many sequences as have it in their row of the page table. One that nobody
    holds is free, unless it is in the prefix index: then it stays for whoever asks for the same
    prefix next, and is evicted when it is needed for something else, the least recently held first
    and the end of a prefix before its start.

    Every call does all that it says or, where it raises, nothing.

    >>> allocator = PageAllocator(num_pages=4, page_size=16)
    >>> prompt = list(range(40))
    >>> pages = allocator.grow([], num_tokens=40)
    >>> pages, allocator.num_free
    ([0, 1, 2], 1)
    >>> allocator.remember(prompt, pages)  # its two full pages
    >>> allocator.free(pages)
    >>> allocator.num_free
    4
    >>> allocator.reuse([*prompt[:33], 7])
    [0, 1]
    """

    def __init__(self, num_pages: int, page_size: int):
        """Starts with all pages free.

        Args:
          num_pages: Of the cache.
          page_size: Tokens per page.

        Raises:
          ValueError: One of them is below 1.
        """
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(reversed(range(num_pages)))  # the next page is the last entry
        self._holders: collections.Counter[int] = collections.Counter()
        self._prefix_of: dict[int, bytes] = {}  # of a page in the index, what it is found by
        self._page_of: dict[bytes, int] = {}
        # Pages in the index that nobody holds, the first to be evicted first.
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, those kept for a prefix that nobody holds included."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Of these, the pages kept for a prefix."""
        return len(self._idle)

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, or none. What they hold is whatever was there before.

        Raises:
          ValueError: `count` is negative.
          OutOfPagesError: Fewer are free.
        """
        if count < 0:
            raise ValueError(f"count={count} must not be negative.")
        if count > self.num_free:
            raise OutOfPagesError(
                f"{count} pages were asked for and {self.num_free} of {self.num_pages} are free "
                f"({self.page_size} tokens each). Free the pages of a finished sequence, or create "
                f"the cache with num_pages={self.num_pages + count - self.num_free} or more."
            )
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._prefix_of.pop(page)]
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        self._holders.update(pages)
        return pages

    def grow(self, pages: Sequence[int], num_tokens: int) -> list[int]:
        """Adds to a sequence's pages those that it lacks to hold `num_tokens`, or none.

        Args:
          pages: The sequence's pages so far, in order.
          num_tokens: Its length, the tokens about to be written included.

        Returns:
          All its pages: one row of the page table.

        Raises:
          ValueError: `num_tokens` is negative, or one of `pages` is not allocated (or given
            twice).
          OutOfPagesError: Fewer are free than it lacks.
        """
        pages = self._held(pages)
        return [*pages, *self.allocate(max(0, self._count(num_tokens) - len(pages)))]

    def free(self, pages: Sequence[int]) -> None:
        """Ends one sequence's hold of its pages, in the order of the sequence.

        Raises:
          ValueError: One of them is not allocated (or is given twice).
        """
        for page in reversed(self._held(pages)):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._prefix_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def share(self, pages: Sequence[int]) -> list[int]:
        """One more sequence holds these pages: a copy of a sequence, until either is written.

        Raises:
          ValueError: One of them is not allocated (or is given twice).
        """
        pages = self._held(pages)
        self._holders.update(pages)
        return pages

    def make_writable(self, pages: Sequence[int], first_token: int) -> Writable:
        """Copy on write: replaces pages that are about to be written and not the sequence's alone.

        A page that others hold too, or that the prefix index knows, is not to be written. The
        copies are to be made before any other page of the allocator is written.

        Args:
          pages: The sequence's pages, in order.
          first_token: The first token that is about to be written, counted from the sequence's
            start; all after it may be.

        Raises:
          ValueError: `first_token` is negative, or one of `pages` is not allocated.
          OutOfPagesError: Fewer are free than are to be replaced.
        """
        pages = self._held(pages)
        if first_token < 0:
            raise ValueError(f"first_token={first_token} must not be negative.")
        places = [
            place
            for place in range(first_token // self.page_size, len(pages))
            if self._holders[pages[place]] > 1 or pages[place] in self._prefix_of
        ]
        replaced = [pages[place] for place in places]
        own = self.allocate(len(places))
        self.free(replaced)
        for place, page in zip(places, own, strict=True):
            pages[place] = page
        return Writable(pages=pages, copies=list(zip(replaced, own, strict=True)))

    def remember(
        self, tokens: Sequence[int], pages: Sequence[int], *, namespace: bytes = b""
    ) -> None:
        """Puts a sequence's full pages into the prefix index.

        Args:
          tokens: Whose keys and values the pages hold by now, from the sequence's start.
          pages: The sequence's pages, in order.
          namespace: What else the keys and values depend on, such as an adapter: a prefix is found
            in its own namespace alone.

        Raises:
          ValueError: One of `pages` is not allocated, or they are too few for the tokens.
        """
        pages = self._held(pages)
        if len(pages) < self._count(len(tokens)):
            raise ValueError(
                f"{len(tokens)} tokens need {self._count(len(tokens))} pages of {self.page_size}, "
                f"and pages={pages} are {len(pages)}."
            )
        for prefix, page in zip(self._prefixes(tokens, namespace), pages, strict=False):
            # A prefix that is known already keeps its page, and a page its prefix.
            if prefix not in self._page_of and page not in self._prefix_of:
                self._page_of[prefix] = page
                self._prefix_of[page] = prefix

    def reuse(self, tokens: Sequence[int], *, namespace: bytes = b"") -> list[int]:
        """Holds the pages of the longest prefix in the index, for one more sequence.

        Never all of the tokens: the last one is left to compute, as something must be.

        Args:
          tokens: Of the sequence.
          namespace: As in `remember`.

        Returns:
          The pages, `page_size` tokens each; to be continued with `grow`.
        """
        pages: list[int] = []
        for prefix in self._prefixes(tokens[: max(0, len(tokens) - 1)], namespace):
            page = self._page_of.get(prefix)
            if page is None:
                break
            pages.append(page)
        self._holders.update(pages)
        for page in pages:
            self._idle.pop(page, None)
        return pages

    def _count(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens} must not be negative.")
        return -(-num_tokens // self.page_size)

    def _prefixes(self, tokens: Sequence[int], namespace: bytes) -> Iterable[bytes]:
        """What each full page is found by: a digest of all tokens up to its end."""
        digest = hashlib.blake2b(namespace, digest_size=32).digest()
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(f"tokens of shape {ids.shape} and dtype {ids.dtype} are no token ids.")
        ids = ids.astype(np.int64)
        for end in range(self.page_size, len(ids) + 1, self.page_size):
            block = ids[end - self.page_size : end].tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=32).digest()
            yield digest

    def _held(self, pages: Sequence[int]) -> list[int]:
        """`pages` as ints, be they numpy's, each allocated and named once."""
        try:
            if any(isinstance(page, bool) for page in pages):
                raise TypeError("a bool is no page id")
            ids = [operator.index(page) for page in pages]
        except TypeError as error:
            raise ValueError(f"pages={pages!r} must be a sequence of page ids: {error}.") from error
        wrong = sorted(page for page in set(ids) if page not in self._holders)
        if wrong:
            raise ValueError(
                f"pages {wrong} are not allocated: freed before, or never. Nothing was changed."
            )
        if len(set(ids)) < len(ids):
            raise ValueError(f"pages={ids} names a page twice. Nothing was changed.")
        return ids
