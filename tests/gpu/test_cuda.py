"""On a CUDA device: what the CPU tests prove, once more where kernels run behind the program's back."""

import pytest
import torch
import torch.nn.functional as F

from paceline.comm import LocalGroup
from paceline.data import Spec
from paceline.parallel.batch_norm import start_batch_norm
from paceline.recipes.transformer_lm import TransformerLM
from paceline.replica import Replica
from paceline.testing.processes import run_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and here is none"),
]


def make_problem():
    torch.manual_seed(0)
    module = TransformerLM(width=64, num_layers=2, num_heads=2).build(Spec(256, (32,))).cuda()
    tokens = torch.randint(256, (8, 33), device="cuda")
    return module, tokens[:, :-1], tokens[:, 1:]


def run_steps(precision, num_steps=20):
    module, inputs, targets = make_problem()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=True)
    group = LocalGroup(device=torch.device("cuda"))
    replica = Replica(module, optimizer, group=group, precision=precision, clip_norm=1.0)
    losses = []
    for _ in range(num_steps):
        logits = replica(inputs)
        replica.backward(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), weight=targets.numel())
        losses.append(replica.update().loss)
    return losses


def test_a_world_of_one_equals_a_plain_loop():
    module, inputs, targets = make_problem()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, fused=True)
    expected = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    assert run_steps("fp32") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision):
    losses = run_steps(precision)
    assert losses[-1] < losses[0] - 1


def reduce_on_nccl():
    import paceline

    with paceline.join() as group:
        tensor = torch.full((1000,), float(group.rank + 1), device=group.device)
        group.all_reduce(tensor, name="sum").wait()
        documents = group.gather_documents({"rank": group.rank}, name="ranks")
        return [tensor.sum().item(), documents]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_reduce_over_nccl():
    for result in run_processes(2, reduce_on_nccl):
        assert result.value == [3000.0, [{"rank": 0}, {"rank": 1}]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_over_workers_equals_one_process(dtype, memory_format):
    generator = torch.Generator("cuda").manual_seed(0)
    inputs, weights = (torch.randn(7, 5, 3, 2, generator=generator, device="cuda").to(dtype) for _ in range(2))
    inputs = inputs.contiguous(memory_format=memory_format)

    def run(layer, inputs, weights):
        inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        output = layer(inputs)
        (output * weights).sum().backward()
        return output.detach(), inputs.grad, layer

    def work(group):
        group.device = torch.device("cuda")
        own = slice(0, 2) if group.rank == 0 else slice(2, 7)
        layer = torch.nn.BatchNorm2d(5).cuda()
        start_batch_norm("global", layer, group)
        return run(layer, inputs[own], weights[own])

    output, of_inputs, alone = run(torch.nn.BatchNorm2d(5).cuda(), inputs, weights)
    results = LocalGroup.run(2, work, timeout_s=20)
    exact = {"atol": 40 * torch.finfo(dtype).eps, "rtol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(torch.cat([result[0] for result in results]), output, **exact)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), of_inputs, **exact)
    for name, parameter in alone.named_parameters():
        total = sum(layer.get_parameter(name).grad for _, _, layer in results)
        torch.testing.assert_close(total, parameter.grad, **exact)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(results[0][2].get_buffer(name), buffer, **exact)
