"""What a construction knows of its tensors beside their values: containers, identities, caches, the generator."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_deferred_questions import compare
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.random import get_rng_state  # by name, as a model's file may import it

from paceline.memory.absent_group import absent_world
from paceline.parallel import UndeferrableError, defer
from paceline.parallel.local import local, local_slice

SHARED: list[Tensor] = []
CACHE: dict[str, Tensor] = {}
HELD: list[Any] = []


def finish(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(5)
    module, construction = defer(build)
    construction.finish(module, torch.device("cpu"))
    return module


def build_with_a_shared_list() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    places = [torch.arange(4.0), torch.randn(3)]
    module[0].places = module[1].places = places
    module[0].by_name = {"places": (places, module[0].weight)}
    return module


def build_with_identities() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    module.names = {id(parameter): name for name, parameter in module.named_parameters()}
    module.references = [weakref.ref(parameter) for parameter in module.parameters()]
    return module


def build_with_a_list_of_others() -> nn.Module:
    module = nn.Linear(4, 4)
    SHARED[:] = [torch.arange(4.0)]
    module.places = SHARED
    return module


def build_in_inference_mode() -> nn.Module:
    module = nn.Linear(4, 4)
    with torch.inference_mode():
        module.register_buffer("places", torch.arange(4.0))
    return module


def test_a_container_that_modules_share_is_one() -> None:
    module = finish(build_with_a_shared_list)
    assert module[0].places is module[1].places is module[0].by_name["places"][0]
    assert module[0].by_name["places"][1] is module[0].weight
    torch.manual_seed(5)
    whole: Any = build_with_a_shared_list()
    assert all(map(torch.equal, module[0].places, whole[0].places))


def test_parameters_stay_the_objects_that_they_were() -> None:
    module = finish(build_with_identities)
    assert module.names == {id(parameter): name for name, parameter in module.named_parameters()}
    assert [reference() for reference in module.references] == list(module.parameters())
    module[1](torch.ones(2, 4))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module[1].parameters())
    compare(lambda: nn.Sequential(nn.LSTM(4, 4), nn.GRU(4, 4, 2)))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (build_with_a_list_of_others, "a container of tensors is held by more than modules"),
        (build_in_inference_mode, "places is made in inference mode"),
    ],
)
def test_what_others_hold_is_refused(build: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(UndeferrableError, match=told):
        defer(build)
    SHARED.clear()


def test_a_filled_cache_can_be_written_to() -> None:
    def build() -> nn.Module:
        CACHE["whole"] = torch.arange(6.0)
        CACHE["part"] = CACHE["whole"][2:]
        return nn.Linear(2, 2)

    with pytest.raises(UndeferrableError, match="in a closure"):
        defer(build)
    CACHE["part"].add_(1)
    assert CACHE["whole"].tolist() == [0, 1, 3, 4, 5, 6]
    CACHE.clear()


def seed_by_state(state: Tensor) -> nn.Module:
    torch.manual_seed(int(state.long().sum()))
    return nn.Linear(40, 40)


def build_by_the_generator() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), seed_by_state(torch.default_generator.get_state()))


def build_by_a_clone() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), seed_by_state(torch.default_generator.clone_state().get_state()))


def build_by_an_imported_function() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), seed_by_state(get_rng_state()))


def build_by_what_seeding_returns() -> nn.Module:
    generator = torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, 40), seed_by_state(generator.get_state()))


def build_with_a_generator_from_before() -> nn.Module:
    first = nn.Linear(40, 40)
    return nn.Sequential(first, seed_by_state(HELD[0].get_state()))


def build_with_a_method_from_before() -> nn.Module:
    first = nn.Linear(40, 40)
    return nn.Sequential(first, seed_by_state(HELD[0]()))


def build_by_naming_the_generator() -> nn.Module:
    module, generator = nn.Linear(40, 40), torch.default_generator
    nn.init.normal_(module.weight, generator=generator)
    nn.init.trunc_normal_(module.bias, generator=generator)
    module.places = torch.randn(7, generator=generator)
    return nn.Sequential(module, nn.Linear(40, 40))


def test_a_construction_may_name_torchs_generator() -> None:
    compare(build_by_naming_the_generator)


GENERATORS = [build_by_the_generator, build_by_a_clone, build_by_an_imported_function, build_by_what_seeding_returns]


@pytest.mark.parametrize("build", GENERATORS)
def test_the_generator_is_asked_for_its_real_state(build: Callable[[], nn.Module]) -> None:
    compare(build)


@pytest.mark.parametrize("build", [build_with_a_generator_from_before, build_with_a_method_from_before])
def test_a_generator_that_other_code_holds_has_its_real_state(build: Callable[[], nn.Module]) -> None:
    is_method = build is build_with_a_method_from_before
    HELD.append(torch.default_generator.get_state if is_method else torch.default_generator)
    try:
        compare(build)
    finally:
        HELD.clear()


def test_a_model_that_keeps_the_generator_is_refused() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        module.generator = torch.default_generator
        return module

    with pytest.raises(UndeferrableError, match="keeps torch's generator"):
        defer(build)


def build_without_elements() -> nn.Module:
    module = nn.ModuleList([nn.Linear(4, 0), nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]), nn.Linear(4, 3)])
    module.register_buffer("none", torch.randn(0, 5))
    module.register_buffer("empty_view", torch.rand(4)[:0])
    return module


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_tensors_without_elements_are_as_in_the_whole_construction() -> None:
    compare(build_without_elements)


def build_tied() -> nn.Module:
    """Return a model with a tied matrix; of its last 16 numbers, which torch draws together, two ranks have parts."""
    module = nn.ModuleDict({"embedding": nn.Embedding(33, 5), "head": nn.Linear(5, 33, bias=False)})
    module["head"].weight = module["embedding"].weight
    return module


@pytest.mark.parametrize("rank", [0, 5, 6, 7])
def test_what_is_tied_is_made_once_where_ranks_have_parts_of_it(rank: int) -> None:
    torch.manual_seed(5)
    whole = build_tied()["head"].weight.detach()
    torch.manual_seed(5)
    module, construction = defer(build_tied)
    with absent_world(rank, 8):
        mesh = init_device_mesh("cpu", (8,))
        part = nn.Parameter(distribute_tensor(module["head"].weight.detach(), mesh, [Shard(0)]))
        module["embedding"].weight = module["head"].weight = part
        construction.finish(module, torch.device("cpu"))
        assert module["embedding"].weight is module["head"].weight
        assert torch.equal(local(module["head"].weight), local_slice(whole, part))


def test_constructions_with_other_random_numbers_are_told_apart() -> None:
    digests = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        digests.append(defer(build_tied)[1].digest)
    assert digests[0] == digests[1] != digests[2]
