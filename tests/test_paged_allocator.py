"""The page allocator: its calls one by one, and any order of them against a model."""

import collections
import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flax_pallas_attn.paged import OutOfPagesError, PageAllocator


def test_allocates_all_or_nothing():
    allocator = PageAllocator(num_pages=4, page_size=16)
    assert allocator.allocate(3) == [0, 1, 2]
    message = (
        "2 pages were asked for and 1 of 4 are free (16 tokens each). Free the pages of a finished "
        "sequence, or create the cache with num_pages=5 or more."
    )
    with pytest.raises(OutOfPagesError, match=re.escape(message)):
        allocator.allocate(2)
    assert allocator.num_free == 1
    assert allocator.allocate(1) == [3]
    assert allocator.allocate(0) == []


def test_grows_a_sequence_page_by_page():
    allocator = PageAllocator(num_pages=4, page_size=16)
    pages = allocator.grow([], 0)
    assert pages == []
    assert allocator.grow(pages, 16) == [0]
    other = allocator.grow([], 1)
    pages = allocator.grow([0], 17)
    assert (other, pages) == ([1], [0, 2])
    assert allocator.grow(pages, 5) == pages
    with pytest.raises(OutOfPagesError, match="3 pages were asked for and 1 of 4"):
        allocator.grow(pages, 80)
    assert allocator.num_free == 1


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 3], "pages [3] are not allocated"),
        ([-1], "pages [-1] are not allocated"),
        ([1, 1], "pages=[1, 1] names a page twice"),
        ([0.0], "pages=[0.0] must be a sequence of page ids: 'float' object"),
        ([False], "pages=[False] must be a sequence of page ids: a bool"),
        (0, "pages=0 must be a sequence of page ids"),
    ],
)
def test_frees_and_grows_all_or_nothing(pages, message):
    allocator = PageAllocator(num_pages=4, page_size=16)
    allocator.allocate(2)
    with pytest.raises(ValueError, match=re.escape(message)):
        allocator.free(pages)
    with pytest.raises(ValueError, match=re.escape(message)):
        allocator.grow(pages, num_tokens=40)
    assert allocator.num_free == 2
    allocator.free([0, 1])
    with pytest.raises(ValueError, match=re.escape("pages [0, 1] are not allocated: freed before")):
        allocator.free([1, 0])
    assert allocator.num_free == 4


def test_pages_of_a_table_row_are_pages():
    allocator = PageAllocator(num_pages=4, page_size=16)
    pages = allocator.grow(np.array(allocator.allocate(1)), num_tokens=20)  # pyright: ignore
    assert pages == [0, 1]
    allocator.free(np.array(pages))  # pyright: ignore
    assert all(type(page) is int for page in allocator.allocate(4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PageAllocator(0, 16), "num_pages=0 must be at least 1"),
        (lambda: PageAllocator(4, 0), "page_size=0 must be at least 1"),
        (lambda: PageAllocator(4, 16).allocate(-1), "count=-1 must not be negative"),
        (lambda: PageAllocator(4, 16).grow([], -1), "num_tokens=-1 must not be negative"),
    ],
)
def test_a_wrong_size_says_so(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_shared_page_is_free_when_nobody_holds_it():
    allocator = PageAllocator(num_pages=3, page_size=4)
    pages = allocator.allocate(2)
    assert allocator.share(pages) == pages
    assert [allocator.holders(page) for page in range(3)] == [2, 2, 0]
    allocator.free(pages)
    assert allocator.num_free == 1
    allocator.free(pages[:1])
    assert [allocator.holders(page) for page in range(3)] == [0, 1, 0]
    assert allocator.num_free == 2


def test_copy_on_write_replaces_what_is_written_and_shared():
    allocator = PageAllocator(num_pages=6, page_size=4)
    pages = allocator.grow([], 11)
    fork = allocator.share(pages)
    # Tokens from 6 on are written: those of the first page stay shared.
    written = allocator.make_writable(fork, first_token=6)
    assert written.pages == [0, 3, 4]
    assert written.copies == [(1, 3), (2, 4)]
    assert allocator.make_writable(written.pages, first_token=6).copies == []
    assert allocator.make_writable(pages, first_token=6).copies == []
    with pytest.raises(OutOfPagesError):
        allocator.make_writable(allocator.share(pages), first_token=0)
    assert [allocator.holders(page) for page in range(6)] == [3, 2, 2, 1, 1, 0]


def test_a_prefix_is_found_again_in_full_pages():
    allocator = PageAllocator(num_pages=8, page_size=4)
    prompt = list(range(10))
    pages = allocator.grow([], 10)
    allocator.remember(prompt, pages)
    assert allocator.reuse([*prompt[:8], 99, 98]) == pages[:2]
    assert allocator.reuse(prompt[:9]) == pages[:2]
    # The last token is always left to compute, so that a prompt of 8 tokens takes one page.
    assert allocator.reuse(prompt[:8]) == pages[:1]
    assert allocator.reuse([1, *prompt[1:]]) == []
    assert allocator.reuse([]) == []
    assert allocator.reuse(prompt, namespace=b"adapter") == []
    assert [allocator.holders(page) for page in pages] == [4, 3, 1]
    # What is in the index is not written, even by the one who computed it.
    assert allocator.make_writable(pages, first_token=7).copies == [(1, 3)]


def test_prefixes_that_nobody_holds_are_evicted_last_used_last_and_end_first():
    allocator = PageAllocator(num_pages=4, page_size=2)
    old, new = allocator.grow([], 4), allocator.grow([], 4)
    allocator.remember([1, 2, 3, 4], old)
    allocator.remember([5, 6, 7, 8], new)
    allocator.free(old)
    allocator.free(new)
    assert (allocator.num_free, allocator.num_idle) == (4, 4)
    allocator.free(allocator.reuse([1, 2, 3, 4, 9]))  # now the last used
    assert allocator.allocate(1) == [new[1]]
    assert allocator.reuse([5, 6, 7, 8, 9]) == new[:1]
    assert allocator.allocate(1) == [old[1]]
    assert allocator.reuse([1, 2, 3, 4, 9]) == old[:1]
    with pytest.raises(OutOfPagesError):
        allocator.allocate(1)


def test_remember_says_what_is_wrong():
    allocator = PageAllocator(num_pages=4, page_size=4)
    message = "9 tokens need 3 pages of 4, and pages=[0, 1] are 2."
    with pytest.raises(ValueError, match=re.escape(message)):
        allocator.remember(range(9), allocator.allocate(2))
    for tokens in ([1.5] * 5, [[1, 2]] * 5):
        with pytest.raises(ValueError, match=r"tokens of shape .* are no token ids"):
            allocator.reuse(tokens)


class Sequences(RuleBasedStateMachine):
    """Sequences that grow, fork, end and start anew, against what each page of a cache holds.

    A page holds the tokens that were written to it; a sequence must find its own in its pages,
    whoever else writes, and every page has as many holders as sequences have it.
    """

    PAGE = 2

    @initialize(num_pages=st.integers(2, 8))
    def start(self, num_pages):
        self.allocator = PageAllocator(num_pages, self.PAGE)
        self.held = {page: [None] * self.PAGE for page in range(num_pages)}
        self.sequences = []  # of tokens and pages
        self.known = set()  # prefixes of whole pages that were remembered

    def pick(self, data):
        return data.draw(st.sampled_from(self.sequences), label="sequence")

    def write(self, sequence, tokens):
        """As an engine does: grow, copy what is shared, write."""
        own, pages = sequence
        first = len(own)
        grown = self.allocator.grow(pages, first + len(tokens))
        try:
            written = self.allocator.make_writable(grown, first)
        except OutOfPagesError:
            self.allocator.free(grown[len(pages) :])
            raise
        for source, target in written.copies:
            self.held[target] = list(self.held[source])
        for i, token in enumerate(tokens):
            page, place = divmod(first + i, self.PAGE)
            self.held[written.pages[page]][place] = token
        own.extend(tokens)
        pages[:] = written.pages

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def begin_again(self, data):
        prefix = data.draw(st.sampled_from(sorted(self.known)), label="prefix")
        self.begin([*prefix, 0])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def begin(self, tokens):
        pages = self.allocator.reuse(tokens)
        assert len(pages) <= (len(tokens) - 1) // self.PAGE
        for end in range(self.PAGE, len(pages) * self.PAGE + 1, self.PAGE):
            assert tuple(tokens[:end]) in self.known
        sequence = (tokens[: len(pages) * self.PAGE], pages)
        try:
            self.write(sequence, tokens[len(sequence[0]) :])
        except OutOfPagesError:
            self.allocator.free(pages)
        else:
            self.sequences.append(sequence)
            self.put_into_index(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, data, tokens):
        sequence = self.pick(data)
        before = (list(sequence[0]), list(sequence[1]), self.allocator.num_free)
        try:
            self.write(sequence, tokens)
        except OutOfPagesError:
            assert (*sequence, self.allocator.num_free) == before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def fork(self, data):
        tokens, pages = self.pick(data)
        self.sequences.append((list(tokens), self.allocator.share(pages)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def remember(self, data):
        self.put_into_index(self.pick(data))

    def put_into_index(self, sequence):
        tokens, pages = sequence
        self.allocator.remember(tokens, pages)
        for end in range(self.PAGE, len(tokens) + 1, self.PAGE):
            self.known.add(tuple(tokens[:end]))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def take_back(self, data):
        """A draft that was not accepted: the pages past the end are given back."""
        sequence = self.pick(data)
        own, pages = sequence
        keep = data.draw(st.integers(0, len(own)))
        needed = -(-keep // self.PAGE)
        self.allocator.free(pages[needed:])
        del own[keep:], pages[needed:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        sequence = self.pick(data)
        self.sequences.remove(sequence)
        self.allocator.free(sequence[1])

    @invariant()
    def each_finds_its_own(self):
        for tokens, pages in self.sequences:
            held = [token for page in pages for token in self.held[page]]
            assert held[: len(tokens)] == tokens

    @invariant()
    def every_page_is_held_by_whom_has_it(self):
        holders = collections.Counter(page for _, pages in self.sequences for page in pages)
        for page in self.held:
            assert self.allocator.holders(page) == holders[page]
        assert self.allocator.num_free == len(self.held) - len(holders)
        assert self.allocator.num_idle <= self.allocator.num_free

    def teardown(self):
        for _, pages in self.sequences:
            self.allocator.free(pages)
        everything = self.allocator.allocate(len(self.held))
        assert sorted(everything) == list(self.held)
        assert self.allocator.num_free == self.allocator.num_idle == 0


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=150, stateful_step_count=60)
