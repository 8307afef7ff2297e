"""Sizes of memory as a user writes and reads them."""

import pytest

from stapo_lightning.byte_sizes import human_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("96 GB", 96 * 10**9), ("1.5e9", 1_500_000_000), ("512mib", 512 * 2**20), ("7", 7)],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "-3GiB", "0GiB", "1..2GB"])
def test_what_is_no_size_says_how_to_write_one(text):
    with pytest.raises(ValueError, match="such as 80GiB or 96GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    # 59073228800 / 2^30 = 55.016.
    [(0, "0 B"), (999, "999 B"), (59073228800, "55.0 GiB"), (110 * 2**30, "110 GiB"), (5 * 2**40, "5.00 TiB")],
)
def test_sizes_are_written_with_three_digits(size, text):
    assert human_bytes(size) == text
