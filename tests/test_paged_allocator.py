"""The page allocator, against a model of it that is a set."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.data())
def test_no_page_is_lost_or_owned_twice(data):
    num_pages = data.draw(st.integers(1, 12))
    allocator = PageAllocator(num_pages, page_size=4)
    sequences: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        free = num_pages - sum(map(len, sequences))
        if sequences and data.draw(st.booleans()):
            index = data.draw(st.integers(0, len(sequences) - 1))
            if data.draw(st.booleans()):
                allocator.free(sequences.pop(index))
            else:
                before = sequences[index]
                tokens = data.draw(st.integers(0, 4 * num_pages))
                lacking = max(0, -(-tokens // 4) - len(before))
                if lacking > free:
                    with pytest.raises(OutOfPagesError):
                        allocator.grow(before, tokens)
                else:
                    sequences[index] = allocator.grow(before, tokens)
                    assert sequences[index][: len(before)] == before
                    assert len(sequences[index]) == len(before) + lacking
        else:
            count = data.draw(st.integers(0, num_pages))
            if count > free:
                with pytest.raises(OutOfPagesError):
                    allocator.allocate(count)
            else:
                sequences.append(allocator.allocate(count))
        owned = [page for pages in sequences for page in pages]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(owned)
