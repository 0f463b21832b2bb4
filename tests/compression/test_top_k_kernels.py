"""All kernels of top-k select the same bits as the reference in plain torch.

Run as a script it checks those in Triton, in its interpreter, which must be told of before Triton is imported.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compression.kernels import find_kernels, numba_top_k, torch_top_k

KINDS = ("normal", "heavy tails", "ties", "sparse", "zeros", "denormal", "huge", "not finite")


def make_block(kind, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(size, generator=generator)
    match kind:
        case "heavy tails":
            return value**9
        case "ties":
            return (2 * value).round()
        case "sparse":
            return value * (torch.rand(size, generator=generator) < 0.01)
        case "zeros":
            return value * 0
        case "denormal":
            return value * 1e-42
        case "huge":
            return value * 1e37
        case "not finite":
            bad = torch.tensor([math.nan, math.inf, -math.inf]).repeat(size // 3 + 1)[:size]
            return torch.where(torch.rand(size, generator=generator) < 0.05, bad, value)
    return value


def select(kernels, value, residual, num_kept, dtype=torch.int32):
    remainder = torch.full_like(value, 7)
    indices, values = torch.full((num_kept,), -1, dtype=dtype, device=value.device), value.new_full((num_kept,), 7)
    is_finite = kernels.select(value, residual, num_kept, remainder, indices, values)
    return remainder, indices.long(), values, is_finite


def check_equal(kernels, value, residual, num_kept, dtype=torch.int32):
    *expected, expected_finite = select(torch_top_k, value, residual, num_kept)
    *found, found_finite = select(kernels, value, residual, num_kept, dtype)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert found_finite == expected_finite


def check_kinds(kernels, sizes, device="cpu"):
    for size in sizes:
        for kind in KINDS:
            value, residual = (make_block(kind, size, seed).to(device) for seed in (0, 1))
            check_equal(kernels, value, None, 1)
            check_equal(kernels, value, residual, math.ceil(size / 100), torch.int64)
            check_equal(kernels, value, residual, size // 2 + 1)
            check_equal(kernels, value, residual, size)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_selects_what_a_sort_does(kind):
    value = make_block(kind, 1009)
    for num_kept in (1, 11, 500, 1009):
        remainder, indices, values, is_finite = select(torch_top_k, value, None, num_kept)
        keys = value.abs().nan_to_num(nan=math.inf, posinf=3e38 if kind == "not finite" else None)
        expected = keys.sort(descending=True, stable=True).indices[:num_kept].sort().values
        if kind != "not finite":  # among which NaN comes first
            assert torch.equal(indices, expected)
        assert len(indices.unique()) == num_kept
        assert not remainder[indices].any()
        torch.testing.assert_close(remainder.index_copy(0, indices, values), value, rtol=0, atol=0, equal_nan=True)
        assert is_finite == (kind != "not finite")


def test_numba_selects_what_the_reference_does():
    check_kinds(numba_top_k, (1, 7, 2047, 2048, 2049, 40_000))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 50_000),
    share=st.floats(0, 1),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    seed=st.integers(0, 1000),
)
def test_numba_selects_what_the_reference_does_on_any_block(size, share, kinds, seed):
    value, residual = make_block(kinds[0], size, seed), make_block(kinds[1], size, seed + 1)
    check_equal(numba_top_k, value, residual, max(math.ceil(share * size), 1))


@pytest.mark.parametrize("misled", ["too high", "too low"])
def test_a_sample_that_misleads_changes_nothing(misled):
    """Blocks in which the elements looked at are the largest, or the smallest."""
    value, num_kept = torch.rand(40_000), 20_000 if misled == "too high" else 100
    sampled = torch.from_numpy(numba_top_k._sample(torch.arange(40_000.0).numpy(), None)).long()
    value[sampled] *= 100 if misled == "too high" else 0.01
    guess = numba_top_k._guess_threshold(value.numpy(), None, num_kept)
    num_reaching = int((value.abs() >= float(guess)).sum())
    assert num_reaching < num_kept if misled == "too high" else num_reaching > 8 * num_kept + 8 * 2048
    check_equal(numba_top_k, value, None, num_kept)


def test_a_good_sample_saves_nearly_all_of_the_sorting():
    value = make_block("normal", 500_000)
    guess = numba_top_k._guess_threshold(value.numpy(), None, 5000)
    assert 5000 <= int((value.abs() >= float(guess)).sum()) < 10_000


def test_columns_of_a_matrix_do_not_mislead_the_sample():
    """Rows as long as the sample's stride: looked at in steps of it, one column would stand for all."""
    value = make_block("normal", 16_384 * 64).view(-1, 64)
    value[:, 0] = 0
    guess = numba_top_k._guess_threshold(value.view(-1).numpy(), None, 10_000)
    assert 10_000 <= int((value.abs() >= float(guess)).sum()) < 20_000


def test_each_device_has_its_kernels():
    assert find_kernels("top_k", torch.device("cpu")) is numba_top_k
    assert find_kernels("top_k", torch.device("meta")) is torch_top_k


def test_triton_selects_what_the_reference_does():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["selected", "the", "same"]


if __name__ == "__main__":
    from paceline.compression.kernels import triton_top_k

    check_kinds(triton_top_k, (1, 4096, 4099))
    print("selected the same")
