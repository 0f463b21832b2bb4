"""The fixed tree of sums: the same for every number of workers."""

import pytest

from paceline.errors import SettingsError
from paceline.programs.summation_tree import SummationTree, TreeSum


def join(earlier, later):
    return (earlier, later)


def sum_among(num_terms, num_workers):
    """Return the tree in which workers add up terms, as nested pairs."""
    tree = SummationTree(num_terms, num_workers)
    roots = {}
    for rank in range(num_workers):
        mine = TreeSum(join)
        for term in tree.terms_of(rank):
            mine.push(term)
        blocks = tree.blocks_of(rank)
        roots |= dict(zip(blocks, mine.take(), strict=True))
    total = TreeSum(join)
    for block in tree.blocks:
        total.push(roots[block], block.size)
    return total.total()


def test_the_tree_is_that_of_its_docstring():
    assert sum_among(1, 1) == 0
    assert sum_among(4, 1) == ((0, 1), (2, 3))
    assert sum_among(7, 1) == (((0, 1), (2, 3)), ((4, 5), 6))


@pytest.mark.parametrize("num_terms", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 60])
def test_every_number_of_workers_has_the_same_tree(num_terms):
    expected = sum_among(num_terms, 1)
    for num_workers in range(2, num_terms + 1):
        assert sum_among(num_terms, num_workers) == expected


@pytest.mark.parametrize(("num_terms", "num_workers"), [(12, 5), (16, 3), (64, 9), (7, 7), (100, 6)])
def test_terms_are_divided_evenly_and_completely(num_terms, num_workers):
    tree = SummationTree(num_terms, num_workers)
    terms = [tree.terms_of(rank) for rank in range(num_workers)]
    assert sorted(term for own in terms for term in own) == list(range(num_terms))
    counts = [len(own) for own in terms]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    assert terms[0][0] == 0
    assert all(block.start % block.size == 0 for block in tree.blocks)
    assert max(len(tree.blocks_of(rank)) for rank in range(num_workers)) == tree.most_blocks


def test_blocks_stay_few():
    """Up to 14 terms per worker cost at most twice an all-reduce, as docs say: three blocks."""
    for num_workers in range(1, 20):
        for num_terms in range(num_workers, 14 * num_workers + 1):
            assert SummationTree(num_terms, num_workers).most_blocks <= 3


def test_fewer_terms_than_workers_are_refused():
    with pytest.raises(SettingsError, match="at least the number of workers, but got 3 for 4 workers; start fewer"):
        SummationTree(3, 4)
