"""Gossip among real processes: messages, links and threads that answer."""

import pytest
import torch
from gossiping import RULES, flat, make_module, train_here, train_in_a_process

from paceline.comm.local_group import LocalGroup
from paceline.testing.processes import run_processes


def test_processes_do_what_threads_do():
    results = run_processes(3, train_in_a_process, timeout_s=50)
    for result in results:
        assert result.exit_code == 0, result.output
    for place, rule in enumerate(RULES.values()):
        threads = LocalGroup.run(3, lambda group, rule=rule: train_here(group, rule))
        for result, (own, mean) in zip(results, threads, strict=True):
            assert result.value[place] == [own, pytest.approx(mean, abs=1e-15)]
    own = torch.tensor([result.value[-1][0] for result in results], dtype=torch.float64)
    began = torch.stack([flat(make_module(rank)) for rank in range(3)])
    torch.testing.assert_close(own.mean(0), began.mean(0), rtol=0, atol=1e-14)
    assert (own - own.mean(0)).norm() < 0.3 * (began - began.mean(0)).norm()
