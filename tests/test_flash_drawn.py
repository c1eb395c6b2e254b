"""What hypothesis draws through the flash kernels, in float32."""

import pytest

from tests.flash_drawn import MASKS, check_drawn


@pytest.mark.parametrize("masks", MASKS)
def test_any_combination(masks):
    check_drawn(masks, "float32")
