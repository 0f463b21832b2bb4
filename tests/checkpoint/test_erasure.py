import itertools

import numpy as np
import pytest

from paceline.checkpoint.erasure import ErasureCode
from paceline.checkpoint.galois import combine, invert, invert_matrix, multiply, power
from paceline.checkpoint.stripes import Stripes, make_teams
from paceline.errors import CheckpointError, SettingsError


def slow_product(a, b):
    """Multiply polynomials over two elements, then reduce modulo x^8 + x^4 + x^3 + x^2 + 1, as in a textbook."""
    product = 0
    for place in range(8):
        if b >> place & 1:
            product ^= a << place
    for place in range(15, 7, -1):
        if product >> place & 1:
            product ^= 0x11D << (place - 8)
    return product


def test_the_field_is_the_textbooks():
    assert all(multiply(a, b) == slow_product(a, b) for a in range(256) for b in range(256))
    assert all(multiply(a, invert(a)) == 1 for a in range(1, 256))
    assert len({power(exponent) for exponent in range(255)}) == 255
    assert power(8) == 0x1D


@pytest.mark.parametrize("num_bytes", [8, 64, 8 * 1024, 8 * 1024 + 8, 3 * 8 * 1024 + 40])
def test_the_kernel_multiplies_as_the_field_does(num_bytes):
    generator = np.random.default_rng(num_bytes)
    matrix = generator.integers(0, 256, (3, 5), np.uint8)
    matrix[1] = 0
    matrix[2] = 1
    data = generator.integers(0, 256, (5, num_bytes), np.uint8)
    out = np.full((3, num_bytes), 99, np.uint8)
    combine(matrix, data, out)
    table = np.array([[slow_product(a, b) for b in range(256)] for a in range(256)], np.uint8)
    expected = np.zeros_like(out)
    for row, column in np.ndindex(3, 5):
        expected[row] ^= table[matrix[row, column]][data[column]]
    assert (out == expected).all()


def test_an_inverted_matrix_times_itself_is_one():
    matrix = ErasureCode(5, 5).parity_matrix
    inverse = invert_matrix(matrix)
    for row, column in np.ndindex(5, 5):
        total = 0
        for place in range(5):
            total ^= multiply(int(matrix[row, place]), int(inverse[place, column]))
        assert total == (row == column)


@pytest.mark.parametrize(
    ("num_data", "num_parity"), [(1, 1), (1, 4), (2, 1), (5, 1), (2, 2), (6, 2), (3, 3), (6, 3), (5, 4), (2, 6)]
)
def test_any_as_many_losses_as_parity_blocks_are_restored(num_data, num_parity):
    code = ErasureCode(num_data, num_parity)
    data = np.random.default_rng(0).integers(0, 256, (num_data, 24), np.uint8)
    blocks = dict(enumerate([*data, *code.encode(data)]))
    for lost in itertools.combinations(blocks, num_parity):
        restored = code.decode({number: block for number, block in blocks.items() if number not in lost})
        assert set(restored) == {number for number in lost if number < num_data}
        assert all((restored[number] == data[number]).all() for number in restored)
        left = [block for number, block in blocks.items() if number not in lost]
        if restored:
            fewer = dict(list({n: b for n, b in blocks.items() if n not in lost}.items())[1:])
            with pytest.raises(CheckpointError, match=rf"{num_data} of {num_data + num_parity} blocks must be left"):
                code.decode(fewer)
        assert len(left) == num_data


def test_one_parity_block_is_xor_and_one_data_block_is_copied():
    data = np.random.default_rng(0).integers(0, 256, (4, 16), np.uint8)
    assert (ErasureCode(4, 1).encode(data)[0] == np.bitwise_xor.reduce(data)).all()
    assert (ErasureCode(4, 3).encode(data)[0] == np.bitwise_xor.reduce(data)).all()
    assert (ErasureCode(1, 3).encode(data[:1]) == data[0]).all()


@pytest.mark.parametrize(("num_data", "num_parity"), [(0, 1), (1, 0), (250, 7)])
def test_impossible_codes_are_refused(num_data, num_parity):
    with pytest.raises(SettingsError, match=rf"at most 256 together, but got {num_data} \+ {num_parity}"):
        ErasureCode(num_data, num_parity)


@pytest.mark.parametrize(("size", "num_parity"), [(2, 1), (3, 1), (5, 2), (4, 3), (7, 3)])
def test_stripes_spread_parity_evenly_and_use_each_block_once(size, num_parity):
    stripes = Stripes(size, num_parity)
    used = []
    for stripe in range(size):
        data, parity = stripes.data_ranks(stripe), stripes.parity_ranks(stripe)
        assert sorted(data + parity) == list(range(size))
        assert all(stripes.stripe_of_parity(place, number) == stripe for number, place in enumerate(parity))
        used += [(place, block) for block, place in enumerate(data)]
        assert all(stripes.stripe_of_data(place, block) == stripe for block, place in enumerate(data))
    assert sorted(used) == list(itertools.product(range(size), range(size - num_parity)))


def test_teams_take_all_ranks_and_part_neighbours():
    assert make_teams(4, 1, 1) == [[0, 2], [1, 3]]
    assert make_teams(7, 2, 1) == [[0, 2, 4, 6], [1, 3, 5]]
    assert make_teams(3, 2, 1) == [[0, 1, 2]]
    with pytest.raises(SettingsError, match=r"num_data\(3\) \+ num_parity\(2\) = 5 ranks, but there are 4; start"):
        make_teams(4, 3, 2)
