import pytest
import torch

from paceline.comm import LocalGroup
from paceline.compression import PowerSGD
from paceline.compression.codec import AllReduce
from paceline.compression.exchange import exchange_blocks
from paceline.testing.lockstep import exchange_all

Size = torch.Size


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def draw_of_rank(rank, num_rows, num_columns, seed=0):
    return draw(num_rows, rank, seed=seed) @ draw(rank, num_columns, seed=seed + 1)


def run(codec, steps):
    states, results = None, []
    for step, values in enumerate(steps):
        results.append(exchange_all(codec, values, states, step=step))
        states = [result.state for result in results[-1]]
    return results


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_sum_of_low_rank_is_exact(rank, feedback):
    """Each worker's matrix has the same columns' space, so the sum's rank is that of each; also below `low_rank`."""
    codec = PowerSGD(low_rank=3, dense_below=0, error_feedback=feedback)
    for step in range(4):
        shared = draw(40, rank, seed=step)
        values = [shared @ draw(rank, 30, seed=10 * step + worker) for worker in range(3)]
        result = exchange_all(codec, values, step=step)[0]
        torch.testing.assert_close(result.total, sum(values), rtol=0, atol=1e-4)


def test_workers_whose_sum_is_of_low_rank_are_exact_though_none_of_them_is():
    exact, noise = draw_of_rank(2, 40, 30), draw(40, 30, seed=5)
    results = exchange_all(PowerSGD(low_rank=2, dense_below=0), [exact + noise, exact - noise])
    torch.testing.assert_close(results[0].total, 2 * exact, rtol=0, atol=1e-4)
    kept = [result.state["worker"] for result in results]
    assert min(tensor.norm() for tensor in kept) > 10
    torch.testing.assert_close(kept[0], -kept[1], rtol=0, atol=1e-4)


def test_the_total_is_the_sum_projected():
    """It lies in R dimensions, and what it leaves of the sum is orthogonal to them."""
    values = [draw(60, 50, seed=rank) for rank in range(3)]
    total = exchange_all(PowerSGD(low_rank=4, dense_below=0), values)[0].total
    sizes = torch.linalg.svdvals(total)
    assert sizes[4] < 1e-5 * sizes[0]
    torch.testing.assert_close(total.t() @ (sum(values) - total), torch.zeros(50, 50), rtol=0, atol=2e-3)


def test_the_residual_is_of_the_worker_s_own_reconstruction():
    """What a worker keeps is orthogonal to P, so it has sent all that it had there. With the sum's it would not be."""
    values = [draw(60, 50, seed=rank) for rank in range(3)]
    results = exchange_all(PowerSGD(low_rank=4, dense_below=0), values)
    basis = torch.linalg.svd(results[0].total).U[:, :4]
    for value, result in zip(values, results, strict=True):
        assert (basis.t() @ value).abs().max() > 1
        assert (basis.t() @ result.state["worker"]).abs().max() < 1e-4
        torch.testing.assert_close(result.state["worker"], value - basis @ (basis.t() @ value), rtol=0, atol=1e-4)


def test_warm_starts_find_the_best_approximation():
    """Subspace iteration on a matrix that stays: the error becomes that of the singular value decomposition."""
    sizes = 0.7 ** torch.arange(30.0)
    value = torch.linalg.qr(draw(40, 30)).Q * sizes @ torch.linalg.qr(draw(30, 30, seed=1)).Q
    codec = PowerSGD(low_rank=3, dense_below=0, error_feedback=False)
    totals = [results[0].total for results in run(codec, [[value]] * 20)]
    best = float(sizes[3:].norm())
    assert float((value - totals[0]).norm()) > 1.05 * best
    assert float((value - totals[-1]).norm()) == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_zeros_stay_zeros_and_a_block_wakes_up_after_them(num_steps):
    """The first rows stay zero, which is where a basis of a matrix of zeros would look."""
    wakened = draw_of_rank(2, 40, 30)
    wakened[:8] = 0
    results = run(PowerSGD(low_rank=4, dense_below=0), [[torch.zeros(40, 30)]] * num_steps + [[wakened]])
    for result in results[:-1]:
        assert not result[0].total.any()
    torch.testing.assert_close(results[-1][0].total, wakened, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_scale_of_gradients_does_not_matter(scale):
    """Q is the last step's: unless its length is taken out, the product of two small gradients is zero."""
    usual, scaled = (
        run(PowerSGD(low_rank=2, dense_below=0), [[draw(20, 10, seed=step) * by] for step in range(4)])
        for by in (1.0, scale)
    )
    torch.testing.assert_close(scaled[-1][0].total / scale, usual[-1][0].total, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("noise", "num_steps"),
    [(0.0, 1000), (0.1, 5000)],
    ids=["they cancel out", "5,000 noisy steps"],
)
def test_residuals_stay_bounded_where_workers_see_different_data(noise, num_steps):
    """Without an exchange of what differs they would grow by the gradient's norm at each step.

    A random projection on 1 of 6 dimensions a step leaves sqrt(5/6) of what is kept, which settles below 12 norms.
    """
    codec, generator = PowerSGD(low_rank=1, dense_below=0), torch.Generator().manual_seed(0)
    bias = draw(6, 5)
    noises = noise * torch.randn(500, 2, 6, 5, generator=generator)
    states, largest = None, 0.0
    for step in range(num_steps):
        values = [bias + noises[step % 500, 0], -bias + noises[step % 500, 1]]
        results = exchange_all(codec, values, states, step=step)
        states = [result.state for result in results]
        largest = max(largest, *(float(state["worker"].norm()) for state in states))
    assert largest < 3 * 12 * float(bias.norm())


def test_what_a_product_would_not_make_smaller_is_summed_as_it_is():
    codec = PowerSGD(low_rank=4, dense_below=0)
    for shape in ((), (3,), (5000,), (8, 8), (4, 1000), (1, 5000), (0, 4), (3, 0)):
        assert codec.payloads(Size(shape), 2) == [(AllReduce, 4 * Size(shape).numel())], shape
    assert codec.payloads(Size([9, 9]), 2) == [(AllReduce, 144), (AllReduce, 144)]
    assert PowerSGD().payloads(Size([9, 9]), 2) == [(AllReduce, 324)]
    values = [draw(5000, seed=rank) for rank in range(2)]
    assert torch.equal(exchange_all(codec, values)[0].total, sum(values))


def test_kernels_of_convolutions_are_matrices_of_a_row_for_each_output():
    codec, value = PowerSGD(low_rank=2, dense_below=0), draw(32, 16, 3, 3)
    assert codec.payloads(Size(value.shape), 2) == [(AllReduce, 4 * 2 * 32), (AllReduce, 4 * 2 * 144)]
    as_matrix = exchange_all(codec, [value.view(32, 144)])[0]
    as_kernel = exchange_all(codec, [value])[0]
    assert torch.equal(as_kernel.total.view(32, 144), as_matrix.total)
    assert as_kernel.state["worker"].shape == value.shape


def test_blocks_that_share_a_message_change_nothing():
    """Nor does where in the message their part begins, which is not aligned."""
    blocks = {"a": (20, 11), "bias": (3,), "b": (33, 17), "c": (13, 40)}
    codec = PowerSGD(low_rank=2, dense_below=0)

    def run_blocks(group, names):
        values = {name: draw(*blocks[name], seed=ord(name[0]) + group.rank) for name in names}
        states = {}
        for step in range(3):
            results = exchange_blocks(codec, values, states, group, step=step, name="test")
            states = {name: result.state for name, result in results.items()}
        for name in set(names) - {"bias"}:
            assert states[name]["q"].untyped_storage().nbytes() == states[name]["q"].nbytes, "it holds the message"
        return {name: result.total for name, result in results.items()}

    together = LocalGroup.run(3, lambda group: run_blocks(group, list(blocks)))
    for name in blocks:
        for rank, alone in enumerate(LocalGroup.run(3, lambda group, name=name: run_blocks(group, [name]))):
            assert torch.equal(alone[name], together[rank][name])
            assert torch.equal(alone[name], together[0][name])


def test_large_products_are_those_of_small_ones():
    """A matrix of more elements than a piece, whose rows do not fill the last one."""
    value = draw_of_rank(2, 1031, 257)
    result = exchange_all(PowerSGD(low_rank=2), [value])[0]
    torch.testing.assert_close(result.total, value, rtol=0, atol=1e-3)
    assert float(result.state["worker"].abs().max()) < 1e-3
