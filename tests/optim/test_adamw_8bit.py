import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizing import make, train
from torch import nn

from paceline.data.images import Images
from paceline.optim import AdamW, AdamW8bit
from paceline.optim.eight_bits import BLOCK_SIZE, Encoded, _tables, values_by_code

always = settings(deadline=None, derandomize=True, max_examples=25)


def encode(values, is_signed):
    encoded = Encoded.zeros(len(values), values.device)
    encoded.encode(values, is_signed=is_signed)
    return encoded


def draw(num_elements, seed, decades, is_signed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_elements, generator=generator)
    values *= 10 ** (-decades * torch.rand(num_elements, generator=generator))
    return values if is_signed else values.abs()


@always
@given(st.integers(1, 3 * BLOCK_SIZE), st.integers(0, 10**6), st.floats(0, 9), st.floats(-30, 30), st.booleans())
def test_to_decode_and_encode_again_changes_nothing(num_elements, seed, decades, exponent, is_signed):
    values = draw(num_elements, seed, decades, is_signed) * 10**exponent
    once = encode(values, is_signed)
    decoded = once.decode(is_signed=is_signed)
    again = encode(decoded, is_signed)
    assert torch.equal(again.codes, once.codes)
    assert torch.equal(again.scales, once.scales)
    assert decoded.abs().max() == values.abs().max(), "the largest of a block is kept as it is"


@always
@given(st.integers(1, 2 * BLOCK_SIZE), st.integers(0, 10**6), st.booleans())
def test_errors_are_small_beside_the_value_in_each_decade(num_elements, seed, is_signed):
    """A decade has 64, 32, 16... values (twice as many above 0), and a value is off by half a distance at most."""
    values = draw(num_elements, seed, 5, is_signed)
    errors = (encode(values, is_signed).decode(is_signed=is_signed) - values).abs()
    largest = F.pad(values.abs(), (0, -num_elements % BLOCK_SIZE)).view(-1, BLOCK_SIZE).amax(1)
    largest = largest.repeat_interleave(BLOCK_SIZE)[:num_elements]
    quotients = values.abs() / largest
    for decade in range(5):
        inside = (quotients > 10.0 ** -(decade + 1)) & (quotients <= 10.0**-decade)
        distance = 0.9 * 10.0**-decade / 2 ** (6 - decade + (not is_signed))
        # Half a distance, half of a last value that was moved to 1, and the rounding to a half float.
        allowed = (0.75 * distance + 2**-11 * 10.0**-decade) * largest
        assert (errors[inside] <= allowed[inside]).all()


def test_a_wider_default_dtype_changes_no_bit():
    def train_once():
        _tables.cache_clear()
        module = nn.Linear(90, 80, dtype=torch.float32)
        with torch.no_grad():
            module.weight.copy_(values[0])
            module.bias.zero_()
        rule = AdamW8bit(smallest=100).build(module)
        for value in values[1:]:
            module.weight.grad, module.bias.grad = value, value[:, 0].clone()
            rule.step()
        kept = rule.state_dict()["state"][0]
        return [module.weight.detach(), module.bias.detach(), kept["exp_avg"], kept["root"]]

    values = [torch.randn(80, 90, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    narrow = train_once()
    torch.set_default_dtype(torch.float64)
    try:
        wide = train_once()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(narrow, wide, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_small_roots_are_never_rounded_to_nothing():
    """Or a first moment would be divided by epsilon alone."""
    roots = torch.tensor([1.0, 1e-9, 1e-20, 0.0])
    assert encode(roots, False).decode(is_signed=False).min() > 0
    assert encode(torch.zeros(300), False).decode(is_signed=False).abs().max() == 0
    assert encode(torch.zeros(300), True).decode(is_signed=True).abs().max() == 0
    signed = encode(torch.tensor([1.0, -1.0, 0.0, -0.5]), True).decode(is_signed=True)
    assert signed.tolist() == pytest.approx([1, -1, 0, -0.5], abs=0.01)
    assert signed[2] == 0


def test_with_all_state_in_32_bits_it_is_adamw():
    fields = {"betas": (0.5, 0.6), "epsilon": 0.01, "weight_decay": 0.3, "learning_rate": 0.02}
    module, reference = make(torch.float32), make(torch.float32)
    expected = train(reference, AdamW(**fields).build(reference), 10)
    for name, value in train(module, AdamW8bit(**fields).build(module), 10).items():
        # The root of the second moment is squared and taken again at each step: some units of 1e-7.
        torch.testing.assert_close(value, expected[name], rtol=2e-5, atol=2e-6, msg=name)


def learn(optimizer_settings, seed, num_steps=120):
    """Return the held-out loss of a network that learns handwritten digits."""
    splits = Images(size=8).open()
    x, y = splits.train.read(np.random.default_rng(seed).permutation(len(splits.train)))
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = optimizer_settings.build(module)
    for step in range(num_steps):
        batch = slice(64 * step % 1536, 64 * step % 1536 + 64)
        optimizer.zero_grad()
        F.cross_entropy(module(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        x, y = splits.held_out.read(np.arange(len(splits.held_out)))
        return float(F.cross_entropy(module(x), y))


def test_it_learns_as_adamw_does():
    fields = {"learning_rate": 1e-3, "betas": (0.9, 0.99)}
    exact, ours = learn(AdamW(**fields), 0), learn(AdamW8bit(**fields, smallest=1), 0)
    assert exact < 0.4, "of 2.3 at the start"
    assert ours == pytest.approx(exact, rel=0.02)
    assert ours != exact


def test_state_takes_a_quarter_of_the_memory():
    module = nn.Linear(500, 400)
    held = {}
    for optimizer_settings in (AdamW(), AdamW8bit()):
        optimizer = optimizer_settings.build(module)
        module(torch.ones(2, 500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept = optimizer.state[module.weight].values()
        held[optimizer_settings.name] = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    num_elements = module.weight.numel()
    assert held["adamw"] == 8 * num_elements + 4
    assert held["adamw_8bit"] <= (2 + 2 * 4 / BLOCK_SIZE) * num_elements + 16
    bias = optimizer.state[module.bias]
    assert {name: tensor.dtype for name, tensor in bias.items()} == dict.fromkeys(
        ("step", "exp_avg", "root"), torch.float32
    ), "a small parameter keeps 32 bits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_saved_state_keeps_its_precision_whatever_the_parameters_are(dtype):
    """Torch's own loading would cast scales to the parameters' dtype, and codes to floats."""
    torch.manual_seed(0)
    module = nn.Linear(64, 128).to(dtype)
    optimizer = AdamW8bit(learning_rate=0.01).build(module)

    def step(optimizer):
        for number, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()

    step(optimizer)
    saved = optimizer.state_dict()
    assert {name: tensor.shape for name, tensor in saved["state"][0].items()} == {
        "step": (), "exp_avg": (128, 64), "root": (128, 64)
    }  # fmt: skip
    assert saved["state"][0]["root"].dtype == torch.float32
    other = AdamW8bit(learning_rate=0.01).build(module)
    other.load_state_dict(saved)
    for parameter in module.parameters():
        for name, kept in optimizer.state[parameter].items():
            mine = other.state[parameter][name]
            assert (mine.dtype, mine.shape) == (kept.dtype, kept.shape)
            assert torch.equal(mine, kept), name
            assert mine.data_ptr() != kept.data_ptr()
    assert optimizer.state[module.weight]["exp_avg_codes"].dtype == torch.uint8


def test_a_large_parameter_is_updated_piece_by_piece_as_in_one(monkeypatch):
    from paceline.optim import adamw_8bit

    def run():
        torch.manual_seed(0)
        module = nn.Linear(70, 50)
        return train_one(module, AdamW8bit(smallest=1).build(module))

    def train_one(module, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(1, 70)).square().sum().backward()
            optimizer.step()
        return module.weight.detach().clone()

    monkeypatch.setattr(adamw_8bit, "_suits_numba", lambda *_: False)
    whole = run()
    monkeypatch.setattr(adamw_8bit, "_CHUNK_ELEMENTS", 4 * BLOCK_SIZE)
    assert torch.equal(run(), whole)


@pytest.mark.parametrize("shape", [(300, 257), (256,), (3, 5)])
def test_the_kernel_steps_as_plain_torch_does(monkeypatch, shape):
    """Up to the rounding of what lies between two codes, which falls the other way now and then."""
    from paceline.optim import adamw_8bit

    def run(num_steps):
        parameter = nn.Parameter(draw(shape, 0))
        module = nn.Module()
        module.register_parameter("weight", parameter)
        optimizer = AdamW8bit(learning_rate=0.01, smallest=1).build(module)
        for step in range(num_steps):
            parameter.grad = draw(shape, step + 1) * 10.0 ** draw(shape, step + 100)
            parameter.grad.view(-1)[::7] = 0
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter], optimizer.state_dict()["state"][0]

    def draw(shape, seed):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    fast = run(1), run(5)
    monkeypatch.setattr(adamw_8bit, "_suits_numba", lambda *_: False)
    plain = run(1), run(5)
    torch.testing.assert_close(fast[0][0], plain[0][0], rtol=1e-6, atol=1e-7)
    for name in ("exp_avg", "root"):
        codes, expected = (kept[1][f"{name}_codes"].int() for kept in (fast[0], plain[0]))
        assert (codes - expected).abs().max() <= 1
        assert (codes != expected).float().mean() < 0.02
        torch.testing.assert_close(fast[0][1][f"{name}_scales"], plain[0][1][f"{name}_scales"], rtol=1e-6, atol=0)
    moved = plain[1][0] - draw(shape, 0)
    assert (fast[1][0] - plain[1][0]).norm() < 0.01 * moved.norm()


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 7e30])
def test_the_kernel_finds_the_nearest_value_on_both_sides_of_each_bound(is_signed, scale):
    kernels = pytest.importorskip("paceline.optim.numba_adamw_8bit")
    table = values_by_code(torch.device("cpu"), is_signed=is_signed).numpy()
    bounds = (table[1:].astype(np.float64) + table[:-1]) / 2
    slack = np.where(np.abs(bounds) < 3e-7, 0.03, 1e-5)  # the smallest signed value begins at 2.8e-7, not 2.75e-7
    below, above = bounds - np.abs(bounds) * slack, bounds + np.abs(bounds) * slack
    quotients = np.concatenate([table, below, above, [0.0]])
    codes = np.arange(len(table))
    expected = np.concatenate([codes, codes[:-1], codes[1:], [127 if is_signed else 0]])
    encode = kernels._encode_signed if is_signed else kernels._encode_unsigned
    found = np.empty(len(quotients), np.uint8)
    encode((quotients * scale).astype(np.float32), np.float32(scale), found)
    assert found.tolist() == expected.tolist()


def test_what_is_not_finite_stays_seen():
    parameter = nn.Parameter(torch.ones(600))
    module = nn.Module()
    module.register_parameter("weight", parameter)
    optimizer = AdamW8bit(smallest=1).build(module)
    parameter.grad = torch.ones(600)
    parameter.grad[300] = torch.nan
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert state["exp_avg"][256:512].isnan().all(), "its block"
    assert state["exp_avg"][:256].isfinite().all()
