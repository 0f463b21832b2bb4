"""Sharded parameters of a run in bf16 on a GPU are gathered in bf16; nowhere else do they lose bits."""

import sys
from types import SimpleNamespace

import pytest
import torch

from paceline.topology.layout import Layout
from paceline.training import training


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("bf16", "cuda", torch.bfloat16),
        ("bf16", "cpu", None),  # where runs keep their bits
        ("fp16", "cuda", None),
        ("fp32", "cuda", None),
    ],
)
def test_a_run_gathers_in_the_dtype_of_forward_on_gpus(monkeypatch, precision, device, expected):
    given = []

    def stop(*_, gather_dtype, **__):
        given.append(gather_dtype)
        raise InterruptedError

    monkeypatch.setattr(training, "parallelize", stop)
    monkeypatch.setattr(training, "save_activations", lambda *_: None)
    monkeypatch.setattr(training, "read_sample", lambda *_: None)
    group = SimpleNamespace(device=torch.device(device), size=2)
    run = SimpleNamespace(
        layout=Layout(sharded=2),
        tensor_plan=None,
        pipeline=None,
        sharded_codec=None,
        precision=precision,
        num_virtual_workers=2,
        global_batch=4,
    )
    with pytest.raises(InterruptedError):
        training.prepare(run, torch.nn.Linear(2, 2), None, group)
    assert given == [expected]


@pytest.mark.parametrize("num_stages", [0, 2])
def test_every_sharded_module_gets_it(monkeypatch, num_stages):
    given = []
    laying = sys.modules[training.parallelize.__module__]  # the package has a function of that name
    monkeypatch.setattr(laying, "shard_module", lambda *_, gather_dtype, **__: given.append(gather_dtype))
    stages = [torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(num_stages)]
    driver = SimpleNamespace(stages=stages) if stages else None
    laying._shard_stages(torch.nn.Sequential(*stages), driver, None, Layout(sharded=2), [], torch.bfloat16)
    assert given == [torch.bfloat16] * max(1, num_stages)
