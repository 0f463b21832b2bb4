"""Sharded data parallelism equals one process, whatever the stage; by hand, without a replica."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from paceline.comm import join
from paceline.optim import SGD
from paceline.parallel.fully_sharded import list_blocks, reshard, set_gradient_sync, shard_module
from paceline.parallel.local import is_partial, local, local_slice, wrap
from paceline.parallel.mesh import Mesh
from paceline.parallel.zero_redundancy import local_optimizer, shard_optimizer
from paceline.testing.processes import check_exits, run_processes
from paceline.topology.layout import Layout

# In float64, where sums in another order differ by some 1e-16 of their terms.
TOLERANCE = 1e-12
NUM_STEPS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))


class Model(nn.Module):
    """Odd sizes, a vector of one element, a tied matrix, a frozen one, and parts that a batch may leave unused."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(num_blocks))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.sometimes = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, use_all: bool = True) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(x) * self.scale
        return self.head(self.sometimes(x) if use_all else x)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Model().to(dtype)


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": vectors}]
    return torch.optim.AdamW(groups, lr=0.1, eps=1e-3, fused=True)


def mean_loss(module: nn.Module, step: int, reader: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * reader + micro)
    tokens = torch.randint(7, (2, 4), generator=generator)
    logits = module(tokens[:, :-1], reader % 2 == 0)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def weight_of(reader: int, micro: int) -> float:
    return 1.0 + reader + 0.5 * micro


def train_alone(num_workers: int, num_micro: int) -> list[dict[str, Any]]:
    """Return the loss, gradients and parameters of each step, of one process that reads what all workers do."""
    module = make_model()
    optimizer = make_optimizer(module)
    shares = [(reader, micro) for reader in range(num_workers) for micro in range(num_micro)]
    weight = sum(weight_of(*share) for share in shares)
    steps = []
    for step in range(NUM_STEPS):
        set_rate(optimizer, step)
        losses = [mean_loss(module, step, *share) * weight_of(*share) for share in shares]
        (sum(losses) / weight).backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        steps.append({"loss": float(sum(losses).detach() / weight), "gradients": gradients, "parameters": parameters})
    return steps


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (step + 1)


def train(mesh: Mesh, zero_stage: int, num_micro: int) -> list[dict[str, Any]]:
    """As `train_alone`, with each rank's own samples. What is not sharded is summed here by hand."""
    module = make_model()
    if zero_stage > 1:
        module = shard_module(module, mesh, zero_stage=zero_stage)
    optimizer = make_optimizer(module)
    if zero_stage == 1:
        optimizer = shard_optimizer(optimizer, mesh)
    parameters = dict(module.named_parameters())
    workers = mesh.group("data", "sharded")
    rest = mesh.group("data") if zero_stage > 1 else workers
    weight = sum(weight_of(reader, micro) for reader in range(workers.size) for micro in range(num_micro))
    steps = []
    for step in range(NUM_STEPS):
        set_rate(optimizer, step)
        numerator = torch.zeros((), dtype=torch.float64)
        for micro in range(num_micro):
            set_gradient_sync(module, micro == num_micro - 1, keep_gathered=zero_stage == 2)
            loss = mean_loss(module, step, workers.rank, micro) * weight_of(workers.rank, micro)
            loss.backward()
            numerator += loss.detach()
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                # With stage 1 a rank may have used none of a parameter: the replica's buckets know of that.
                gradient = local(parameter.grad) if parameter.grad is not None else torch.zeros_like(parameter)
                if rest.size > 1:
                    rest.all_reduce(gradient, name=name).wait()
                parameter.grad = wrap(parameter, gradient / weight)
        workers.all_reduce(numerator, name="loss").wait()
        gradients = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        steps.append(
            {
                "loss": float(numerator / weight),
                "gradients": gradients,
                "parameters": {name: whole(p) for name, p in parameters.items()},
            }
        )
    return steps


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def expect_close(here: Mapping[str, Tensor], there: Mapping[str, Tensor], what: Any) -> None:
    assert here.keys() == there.keys(), what
    for name, tensor in here.items():
        assert (tensor - there[name]).abs().max() < TOLERANCE, (what, name)


def equal_one_process(world: Any) -> None:
    alone = {num_micro: train_alone(4, num_micro) for num_micro in (1, 2)}
    for settings in ({"sharded": 4}, {"data": 2, "sharded": 2}):
        mesh = Mesh(world, Layout(**settings).resolve(4))
        for zero_stage in (1, 2, 3):
            for num_micro, expected in alone.items():
                what = (settings, zero_stage, num_micro)
                for step, mine in zip(expected, train(mesh, zero_stage, num_micro), strict=True):
                    assert abs(mine["loss"] - step["loss"]) < TOLERANCE, what
                    expect_close(mine["gradients"], step["gradients"], what)
                    expect_close(mine["parameters"], step["parameters"], what)


def gradients_stay_in_buffers(world: Any) -> None:
    """Hooks run once a step, and sums are added to views of a buffer that was there before."""
    mesh = Mesh(world, Layout(sharded=4).resolve(4))
    module = shard_module(make_model(), mesh)
    fired, views = [], {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), name
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
            views[name] = torch.zeros(local(parameter).numel() + 2, dtype=torch.float64)[1:-1].view(
                local(parameter).shape
            )
            parameter.grad = wrap(parameter, views[name])
    for is_on in (False, True):
        set_gradient_sync(module, is_on)
        mean_loss(module, 0, world.rank, int(is_on)).backward()
        assert bool(fired) == is_on
    assert sorted(fired) == sorted(views)
    order = [name for names in list_blocks(module).values() for name in names]
    assert sorted(order) == sorted(fired)
    expected = make_model()
    for reader in range(4):
        for micro in range(2):
            mean_loss(expected, 0, reader, micro).backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert local(parameter.grad).data_ptr() == views[name].data_ptr()
            assert (whole(parameter.grad) - expected.get_parameter(name).grad).abs().max() < TOLERANCE


def evaluation_sees_what_changed(world: Any) -> None:
    for zero_stage in (2, 3):
        mesh = Mesh(world, Layout(sharded=4).resolve(4))
        module, expected = shard_module(make_model(), mesh, zero_stage=zero_stage), make_model()
        held = dict(module.named_parameters())
        for _ in range(2):
            with torch.no_grad():
                assert abs(mean_loss(module, 0, 0, 0) - mean_loss(expected, 0, 0, 0)) < TOLERANCE
                assert dict(module.named_parameters()) == held  # the parts again, not what was gathered
                for name, parameter in held.items():
                    local(parameter).mul_(0.5)
                    expected.get_parameter(name).mul_(0.5)
        mean_loss(module, 0, world.rank, 0)  # no backward: only stage 3 lets go of blocks by itself
        gathered = module.get_parameter("blocks.0.wide.weight")
        assert isinstance(gathered, DTensor) == (zero_stage == 3)
        assert not isinstance(module.get_parameter("scale"), DTensor)
        reshard(module)
        assert dict(module.named_parameters()) == held


def bfloat16_is_gathered(world: Any) -> None:
    mesh = Mesh(world, Layout(sharded=4).resolve(4))
    module, expected = (
        shard_module(make_model(torch.float32), mesh, gather_dtype=torch.bfloat16),
        make_model(torch.float32),
    )
    with torch.autocast("cpu", torch.bfloat16):
        mean_loss(module, 0, 0, 0).backward()
        (4 * mean_loss(expected, 0, 0, 0)).backward()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.float32)
            there = expected.get_parameter(name).grad
            # Three digits.
            assert (whole(parameter.grad) - there).norm() < 0.02 * there.norm(), name
    assert whole(module.get_parameter("embedding.weight").grad).any()


def parts_are_those_of_torch(world: Any) -> None:
    mesh = Mesh(world, Layout(sharded=2, tensor=2).resolve(4))
    for size in (3, 4, 5, 6, 7):
        full = torch.arange(2.0 * size).view(size, 2)
        layer = nn.Linear(2, size)
        layer.weight.data.copy_(full)
        parallelize_module(layer, mesh.device_mesh["tensor"], ColwiseParallel())
        shard_module(layer, mesh)
        assert torch.equal(local_slice(full, layer.weight), local(layer.weight))
        rebuilt = wrap(layer.weight, local_slice(full, layer.weight).clone())
        assert torch.equal(whole(rebuilt), full)
        for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)]):
            like = distribute_tensor(full, mesh.device_mesh["sharded", "tensor"], placements)
            assert torch.equal(local_slice(full, like), local(like)), placements
    assert not is_partial(layer.weight, "tensor")
    column = torch.ones(2, 1)
    vector = distribute_tensor(torch.ones(2, 4), mesh.device_mesh["tensor"], [Shard(1)])
    product = vector @ distribute_tensor(torch.ones(4, 1), mesh.device_mesh["tensor"], [Shard(0)])
    assert is_partial(product, "tensor")
    assert not is_partial(product, "sharded")
    assert torch.equal(local(product), 2 * column)


def optimizer_state_is_shared_out(world: Any) -> None:
    """Each rank keeps a part; loaded into another layout, training goes on as if nothing had happened."""
    steps = []
    for layouts in (({"sharded": 4}, {"sharded": 4}), ({"sharded": 4}, {"data": 2, "sharded": 2})):
        module = make_model()
        saved: dict[str, dict[str, Any]] = {}
        for number, settings in enumerate(layouts):
            mesh = Mesh(world, Layout(**settings).resolve(4))
            optimizer = shard_optimizer(make_optimizer(module), mesh)
            load(optimizer, module, saved)
            set_rate(optimizer, number)
            mean_loss(module, number, 0, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
            saved = gather(optimizer, module, mesh)
            assert saved.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
            sizes = [sum(p.numel() for g in local_optimizer(optimizer).param_groups for p in g["params"])]
            sizes = world.gather_documents(sizes, name="sizes")
            assert max(sizes)[0] < 0.6 * sum(p.numel() for p in module.parameters())
        steps.append({name: p.detach() for name, p in module.named_parameters()})
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def momentum_of_shared_parameters_may_begin_late(world: Any) -> None:
    mesh, module, alone = Mesh(world, Layout(data=2, sharded=2).resolve(4)), make_model(), make_model()
    shared = shard_optimizer(SGD().build(module), mesh)
    parameters = [parameter for parameter in alone.parameters() if parameter.requires_grad]
    plain = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    for reader in (1, 0, 1):  # the first and the last leave `sometimes` unused
        for model, optimizer in ((module, shared), (alone, plain)):
            mean_loss(model, 0, reader, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def gather(optimizer: torch.optim.Optimizer, module: nn.Module, mesh: Mesh) -> dict[str, dict[str, Any]]:
    names = {id(p): name for name, p in module.named_parameters()}
    states = local_optimizer(optimizer).state
    mine = {names[id(p)]: {k: v.tolist() for k, v in state.items()} for p, state in states.items()}
    everybody = mesh.group("sharded").gather_documents(mine, name="states")
    assert sum(len(theirs) for theirs in everybody) == len({name for theirs in everybody for name in theirs})
    return {name: state for theirs in everybody for name, state in theirs.items()}


def load(optimizer: torch.optim.Optimizer, module: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    names, inner = {id(p): name for name, p in module.named_parameters()}, local_optimizer(optimizer)
    held = [names[id(p)] for group in inner.param_groups for p in group["params"]]
    state = {
        index: {key: torch.tensor(value, dtype=torch.float64) for key, value in saved[name].items()}
        for index, name in enumerate(held)
        if name in saved
    }
    inner.load_state_dict({"state": state, "param_groups": inner.state_dict()["param_groups"]})


def check_on_four_ranks() -> None:
    world = join(timeout_s=58)
    meshes = Mesh(world, Layout(sharded=4).resolve(4))
    assert meshes.device_mesh.size() == 4  # the default group is this one's, to the end
    for check in (
        equal_one_process,
        gradients_stay_in_buffers,
        evaluation_sees_what_changed,
        bfloat16_is_gathered,
        parts_are_those_of_torch,
        optimizer_state_is_shared_out,
        momentum_of_shared_parameters_may_begin_late,
    ):
        check(world)
    meshes.close()
    world.close()


def test_sharded_training_on_four_ranks() -> None:
    results = run_processes(4, check_on_four_ranks, timeout_s=55)

    check_exits(results)
