"""Which pages of a cache are free: bookkeeping on the host."""

import operator
from collections.abc import Sequence


class OutOfPagesError(RuntimeError):
    """Fewer pages are free than were asked for. Nothing was allocated."""


class PageAllocator:
    """Hands out page ids of a `PagedKVCache`.

    >>> allocator = PageAllocator(num_pages=4, page_size=16)
    >>> pages = allocator.grow([], num_tokens=20)
    >>> pages, allocator.num_free
    ([0, 1], 2)
    >>> pages = allocator.grow(pages, num_tokens=33)
    >>> allocator.free(pages)
    >>> allocator.num_free
    4
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
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, or none.

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
        pages = [self._free.pop() for _ in range(count)]
        self._allocated.update(pages)
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
        pages = self._allocated_pages(pages)
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens} must not be negative.")
        needed = -(-num_tokens // self.page_size)
        return [*pages, *self.allocate(max(0, needed - len(pages)))]

    def free(self, pages: Sequence[int]) -> None:
        """Gives pages back, or none.

        Raises:
          ValueError: One of them is not allocated (or is given twice).
        """
        pages = self._allocated_pages(pages)
        self._allocated.difference_update(pages)
        self._free.extend(reversed(pages))

    def _allocated_pages(self, pages: Sequence[int]) -> list[int]:
        """`pages` as ints, be they numpy's, each allocated and named once."""
        try:
            if any(isinstance(page, bool) for page in pages):
                raise TypeError("a bool is no page id")
            ids = [operator.index(page) for page in pages]
        except TypeError as error:
            raise ValueError(f"pages={pages!r} must be a sequence of page ids: {error}.") from error
        wrong = sorted(set(ids) - self._allocated)
        if wrong:
            raise ValueError(
                f"pages {wrong} are not allocated: freed before, or never. Nothing was changed."
            )
        if len(set(ids)) < len(ids):
            raise ValueError(f"pages={ids} names a page twice. Nothing was changed.")
        return ids
