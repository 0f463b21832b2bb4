"""A model built without memory has, bit for bit, the values of the whole construction, on the ranks that hold them."""

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from test_layouts import make_model
from torch import nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from paceline.comm import join
from paceline.memory import StorageTracker
from paceline.parallel import UndeferrableError, defer, parallelize
from paceline.parallel.deferred import construction
from paceline.parallel.deferred.generator import skip
from paceline.parallel.deferred.proof import Prover
from paceline.parallel.local import local, local_slice
from paceline.parallel.pipeline.settings import PipelineSettings
from paceline.testing.processes import run_processes
from paceline.topology.layout import Layout


class Odd(nn.Module):
    """Whatever initialisations do: in blocks of rows, with values that are asked for, ties, dtypes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.joint = nn.Linear(100, 70)
        nn.init.orthogonal_(self.joint.weight)
        nn.init.trunc_normal_(self.joint.bias, std=0.02)
        self.embedding = nn.Embedding(1000, 64, padding_idx=3)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.sum = nn.Parameter(torch.randn(128, 128) * 0.02 + torch.eye(128))
        with torch.no_grad():
            self.sum[5:7].normal_()
            self.sum.copy_(self.sum.T.clone())
        self.register_buffer("angles", torch.outer(torch.arange(10.0), 1 / 10**4 ** (torch.arange(0, 64, 2) / 64)))
        self.register_buffer("order", torch.randperm(5000))
        self.frequencies = [torch.arange(7).float()]
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.rnn = nn.LSTM(32, 64, 2)
        self.low = nn.Linear(80, 80).bfloat16()
        self.high = nn.Linear(100, 100).double()
        nn.init.sparse_(self.high.weight, 0.3)
        self.rare = nn.Parameter(torch.empty(99).exponential_())
        self.uneven = nn.Parameter(torch.empty(71, 73).normal_())
        self.norm = nn.BatchNorm2d(64)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            module.weight.is_embedding = True  # type: ignore[attr-defined]


def build_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 2)


def build_with_forwards() -> nn.Module:
    """Return a model that was trained a step while it was built, whose statistics no operator's schema mentions."""
    track = {"affine": True, "track_running_stats": True}
    module = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8, momentum=None), nn.InstanceNorm1d(8, **track))
    module.append(FusedMovingAvgObsFakeQuantize())
    for _ in range(2):
        module(torch.randn(16, 3, 9)).square().sum().backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
    module.zero_grad()
    with torch.no_grad():
        module.eval()(torch.randn(2, 3, 9))
    return module.train()


def build_with_parametrizations() -> nn.Module:
    orthogonal, spectral = (
        parametrizations.orthogonal(nn.Linear(16, 16)),
        parametrizations.spectral_norm(nn.Linear(16, 8)),
    )
    return nn.Sequential(orthogonal, spectral, parametrizations.weight_norm(nn.Linear(8, 8)))


def build_without_initialisation() -> nn.Module:
    skipped = nn.utils.skip_init(nn.Linear, 8, 8)
    nn.init.normal_(skipped.weight)
    nn.init.zeros_(skipped.bias)
    with torch.device("meta"):
        later = nn.Linear(8, 8)
    later.to_empty(device="cpu").reset_parameters()
    return nn.Sequential(skipped, later)


def build_with_sizes_by_values() -> nn.Module:
    chosen = (torch.rand(40) > 0.5).nonzero(as_tuple=True)[0].clone()
    module = nn.ModuleList([nn.Linear(len(chosen), 8), nn.Embedding(len(torch.randint(0, 99, (40,)).unique()), 8)])
    module.register_buffer("chosen", chosen)
    module.register_buffer("larger", torch.randn(99)[chosen] / chosen.shape[0])
    assert torch.isfinite(module[0].weight).all()
    assert torch.allclose(module[0].weight, module[0].weight)
    assert not torch.equal(module[1].weight, module[1].weight + 1)
    return module


def build_with_copies() -> nn.Module:
    module = nn.Transformer(8, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=16, batch_first=True)
    layers = nn.ModuleList(copy.deepcopy(module.encoder.layers[0]) for _ in range(2))
    for parameter in layers.parameters():
        nn.init.normal_(parameter)
    module.more = layers
    return module


def build_by_the_generators_state() -> nn.Module:
    first = nn.Linear(40, 40)
    torch.manual_seed(int(torch.get_rng_state().to(torch.int64).sum()))
    return nn.Sequential(first, nn.Linear(40, 40))


BUILDERS: list[Callable[[], nn.Module]] = [
    Odd,
    build_encoder,
    make_model,
    build_with_forwards,
    build_with_parametrizations,
    build_without_initialisation,
    build_with_sizes_by_values,
    build_with_copies,
    build_by_the_generators_state,
]


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict(keep_vars=True) | dict(module.named_buffers())


@pytest.mark.parametrize("build", BUILDERS)
def test_values_and_the_generator_are_those_of_the_whole_construction(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    whole, drawn = build(), torch.rand(3)
    torch.manual_seed(5)
    module, construction = defer(build)
    assert torch.equal(torch.rand(3), drawn)
    assert all(parameter.is_meta for parameter in module.parameters() if parameter.numel() > 1)
    construction.finish(module, torch.device("cpu"))
    expected, found = state_of(whole), state_of(module)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert (found[name].dtype, found[name].stride()) == (tensor.dtype, tensor.stride()), name
        assert found[name].requires_grad == tensor.requires_grad, name
    ties = {name: [other for other in found if found[other] is found[name]] for name in found}
    assert ties == {name: [other for other in expected if expected[other] is expected[name]] for name in expected}
    if isinstance(module, Odd) and isinstance(whole, Odd):
        assert module.rates == whole.rates
        assert torch.equal(module.frequencies[0], whole.frequencies[0])
        assert module.embedding.weight.is_embedding


class Seeding(nn.Module):
    """A model that goes back in its random numbers, seeds them, and draws some for other tensors."""

    def __init__(self) -> None:
        super().__init__()
        before = torch.get_rng_state()
        self.first = nn.Linear(64, 64)
        between = torch.get_rng_state()
        self.second = nn.Linear(64, 64)
        torch.set_rng_state(before)
        self.like_first = nn.Linear(64, 64)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.seeded = nn.Linear(64, 64)
        self.third = nn.Linear(64, 64)
        OUTSIDE.normal_()
        self.after_others = nn.Linear(64, 64)
        torch.set_rng_state(between)
        self.like_second = nn.Linear(64, 64)


OUTSIDE = torch.zeros(100)


def test_code_may_keep_and_set_the_generators_state() -> None:
    torch.manual_seed(5)
    whole, drawn = Seeding(), torch.rand(3)
    outside = OUTSIDE.clone()
    assert torch.equal(whole.first.weight, whole.like_first.weight)
    assert torch.equal(whole.second.weight, whole.like_second.weight)
    torch.manual_seed(5)
    module, construction = defer(Seeding)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(OUTSIDE, outside)
    construction.finish(module, torch.device("cpu"))
    for name, tensor in whole.named_parameters():
        assert torch.equal(module.get_parameter(name), tensor), name


def test_a_construction_is_freed_with_the_last_who_holds_it() -> None:
    gc.collect()
    gc.disable()
    try:
        module, construction = defer(lambda: nn.Linear(4, 4))
        recording = weakref.ref(construction._recording)
        assert recording() is not None
        del module, construction
        assert recording() is None, "what was recorded must not wait for a garbage collection"
    finally:
        gc.enable()


def test_slices_are_made_in_their_own_memory() -> None:
    build = functools.partial(make_model, width=128)
    whole = build()
    _, construction = defer(build)
    recording, num_sliced = construction._recording, 0
    for name, parameter in whole.named_parameters():
        reference = construction._references[name]
        for begin in (0, 5, 32, parameter.numel() // 2):
            length = parameter.numel() - begin - 3
            with StorageTracker("cpu") as tracker:
                part = recording.compute_rows(reference, begin, length)
            if part is None:
                continue
            num_sliced += 1
            assert torch.equal(part, parameter.detach().flatten()[begin : begin + length]), name
            assert tracker.peak_bytes <= 8 * (length + 32) + 16_000, name  # 5 kB is a state of the generator
    assert num_sliced > 40


def build_from_read_weights() -> nn.Module:
    module = nn.Linear(2**12, 2**13)
    with torch.no_grad():
        module.weight.copy_(torch.frombuffer(bytearray(2**27), dtype=torch.float32).view(2**13, 2**12))
    return module


def build_with_own_generator() -> nn.Module:
    module = nn.Linear(4, 4)
    nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(1))
    return module


def build_with_shared_memory() -> nn.Module:
    module = nn.Linear(4, 4)
    module.first_row = nn.Parameter(module.weight.detach()[0])
    return module


_ELSEWHERE: list[torch.Tensor] = []


def build_with_tensors_elsewhere() -> nn.Module:
    module = nn.Linear(4, 4)
    _ELSEWHERE[:] = [torch.ones(3)]
    return module


def build_on_meta() -> nn.Module:
    return nn.Linear(4, 4, device="meta")


def build_from_numpy() -> nn.Module:
    module = nn.Linear(4, 4)
    module.weight.detach().numpy()[:] = 1.0
    return module


def build_lazily() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))


def build_by_address() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in {one.data_ptr(): one for one in module.parameters()}.values():
        nn.init.normal_(parameter)
    return module


def build_by_storage() -> nn.Module:
    module = nn.Linear(4, 4)
    if module.weight.untyped_storage().data_ptr() == module.bias.untyped_storage().data_ptr():
        module.weight = nn.Parameter(torch.ones(4, 4))
    return module


def build_in_a_thread() -> nn.Module:
    module = nn.Linear(4, 4)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(nn.init.constant_, module.weight, 3.0)
    return module


def build_by_text() -> nn.Module:
    module = nn.Linear(4, 4)
    torch.manual_seed(len(repr(module.weight)))
    nn.init.normal_(module.weight)
    return module


def build_by_another_library() -> nn.Module:
    module = nn.Linear(4, 4)
    module.scale = float(np.from_dlpack(module.weight.detach()).max())
    return module


@torch.library.custom_op("paceline_test::count", mutates_args=())
def count(counter: torch.Tensor) -> torch.Tensor:
    counter += 1  # which the schema denies
    return counter.clone()


@count.register_fake
def _count(counter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(counter)


def build_with_operator() -> nn.Module:
    module = nn.BatchNorm1d(4)
    count(module.running_mean)
    return module


def build_with_statistics_of_others() -> nn.Module:
    module = nn.BatchNorm1d(4)
    nn.functional.batch_norm(torch.randn(8, 4), torch.from_numpy(np.zeros(4, "f")), module.running_var, training=True)
    return module


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (build_from_read_weights, "copies values from elsewhere"),
        (build_with_own_generator, "generator of its own"),
        (build_with_shared_memory, "first_row shares memory with another tensor"),
        (build_with_tensors_elsewhere, "keeps tensors that are neither"),
        (build_on_meta, "no memory in the model itself"),
        (build_from_numpy, "asks for a NumPy array"),
        (build_by_address, "asks for the address"),
        (build_by_storage, "asks for the address"),
        (build_in_a_thread, "another thread works on its tensors"),
        (build_by_text, "makes a text of a tensor's values"),
        (build_by_another_library, "hands a tensor to another library"),
        (build_lazily, "lazy modules, whose sizes a first batch decides"),
        (build_with_operator, "calls the operator paceline_test.count.default, which is not torch's own"),
        (build_with_statistics_of_others, "writes at once to the model's tensors and to others"),
    ],
)
def test_what_cannot_be_deferred_is_refused_and_leaves_the_generator(build: Callable[[], nn.Module], told: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(UndeferrableError, match=told):
        defer(build)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_write_that_nobody_announces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.parallel.deferred.operators._STATISTICS", "other")
    with pytest.raises(UndeferrableError, match=r"native_batch_norm.default writes to a tensor without announcing it"):
        defer(build_with_forwards)


def test_a_result_that_has_another_shape_with_values_is_found() -> None:
    left, right = torch.empty(2, 3), torch.empty(3, 2)
    Prover().prove(torch.ops.aten.mm.default, (left, right), {}, {0: torch.empty(2, 2)})
    with pytest.raises(UndeferrableError, match=r"mm.default makes a tensor that has another shape or order with"):
        Prover().prove(torch.ops.aten.mm.default, (left, right), {}, {0: torch.empty(2, 2).t()})


TRIALS: dict[str, Callable[[], object]] = {
    "cholesky": lambda: torch.linalg.cholesky(-torch.eye(3)),
    "inverse": lambda: torch.linalg.inv(torch.zeros(3, 3)),
    "solution": lambda: torch.linalg.solve(torch.zeros(3, 3), torch.rand(3)),
    "singular values": lambda: torch.linalg.svd(torch.full((3, 3), torch.nan)),
    "eigenvalues": lambda: torch.linalg.eigh(torch.full((3, 3), torch.nan)),
    "multinomial": lambda: torch.multinomial(torch.zeros(5), 2),
    "bernoulli": lambda: torch.bernoulli(torch.full((3,), 2.0)),
    "deviation": lambda: torch.normal(torch.zeros(3), -torch.ones(3)),
    "index": lambda: torch.zeros(3)[torch.tensor([1, 3])],
    "assignment": lambda: torch.zeros(3, 3).index_put_((torch.full((1,), 7),), torch.ones(3)),
    "gather": lambda: torch.zeros(3).gather(0, torch.full((2,), 3)),
    "embedding": lambda: nn.Embedding(3, 3)(torch.full((2,), 3)),
    "class": lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.full((2,), 3)),
    "probability": lambda: nn.functional.binary_cross_entropy(torch.full((3,), 2.0), torch.zeros(3)),
    "division": lambda: torch.ones(3, dtype=torch.int64) // torch.zeros(3, dtype=torch.int64),
    "NumPy": lambda: torch.zeros(3).numpy().dot("text"),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_an_error_that_the_construction_catches_is_no_less_of_a_reason(trial: str) -> None:
    def build() -> nn.Module:
        try:
            TRIALS[trial]()
        except Exception:
            return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return nn.Linear(4, 4)

    assert len(list(build().children())) == 2
    with pytest.raises(UndeferrableError):
        defer(build)


@pytest.mark.parametrize("num_drawn", [0, 1, 623, 624, 625, 20001])
@pytest.mark.parametrize("num_words", [0, 1, 623, 624, 625, 1248, 10**4, 10**6, 3 * 10**6 + 1])
def test_a_skip_ends_where_drawing_does(num_drawn: int, num_words: int) -> None:
    torch.manual_seed(3)
    torch.empty(num_drawn).uniform_()
    before = torch.get_rng_state()
    torch.empty(num_words).uniform_()
    expected = torch.rand(700)
    torch.set_rng_state(skip(before, num_words))
    assert torch.equal(torch.rand(700), expected)


def test_skips_of_any_length_add_up() -> None:
    state = torch.get_rng_state()
    for first, second in ((624 * 2**21, 624 * (2**21 - 1)), (10**12 + 1, 3 * 10**15), (19937 * 624, 19936 * 624)):
        assert torch.equal(skip(skip(state, first), second), skip(state, first + second))


LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "2": [
        {"sharded": 2, "zero_stage": 3},
        {"sharded": 2, "zero_stage": 2},
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 2, "order": "interleaved"},
    ],
    "4": [{"sharded": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2}],
    "4 otherwise": [{"sharded": 2, "pipeline": 2}, {"sharded": 4}],
}
"""Layouts by the number of their ranks."""


def build_parts(layouts: list[dict[str, Any]]) -> list[list[str]]:
    """Return the names that differ from the whole model's values, by layout."""
    group = join()
    torch.set_num_threads(1)
    build = functools.partial(make_model, num_layers=4)
    whole = {name: tensor.detach() for name, tensor in build().state_dict(keep_vars=True).items()}
    largest = max(tensor.nbytes for tensor in whole.values())
    wrong = []
    for layout in layouts:
        settings = dict(layout)
        pipeline = PipelineSettings(order=settings.pop("order", "1f1b"))
        module, construction = defer(build)
        with StorageTracker("cpu") as tracker:
            module = parallelize(
                module,
                Layout(**settings),
                group=group,
                pipeline=pipeline,
                sample=torch.zeros(1, 16, dtype=torch.int64),
                construction=construction,
            )
        held = dict(module.state_dict(keep_vars=True))
        wrong.append([name for name, tensor in held.items() if not is_slice(tensor, whole[name])])
        part = sum(local(tensor).nbytes for tensor in {id(tensor): tensor for tensor in held.values()}.values())
        is_compared = "tensor" in layout  # with the whole model
        if not is_compared and tracker.peak_bytes > part + largest + 8192:
            wrong[-1].append(f"peak {tracker.peak_bytes} with {part} of its own")
        group.membership.shards[-1].close()
    group.close()
    return wrong


def is_slice(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    expected = local_slice(whole, tensor)
    return torch.equal(local(tensor), expected) and (isinstance(tensor, DTensor) or tensor.shape == whole.shape)


@pytest.mark.parametrize(
    "name", ["2", "4", pytest.param("4 otherwise", marks=[pytest.mark.slow, pytest.mark.campaign])]
)
def test_each_rank_makes_its_part_of_the_whole_construction(name: str) -> None:
    for result in run_processes(int(name[0]), build_parts, {"layouts": LAYOUTS[name]}):
        assert result.exit_code == 0, result.output
        assert result.value == [[]] * len(LAYOUTS[name]), result.rank


def test_the_generator_is_held_only_by_code_beside_torch_and_this_package() -> None:
    assert not construction._is_held_by_frozen()
    assert not construction._is_held(gc.get_referrers(torch.default_generator))

    holder = [torch.default_generator]
    assert construction._is_held_by_frozen()
    assert not construction._is_held(gc.get_referrers(torch.default_generator)), "it is frozen now"
    del holder
