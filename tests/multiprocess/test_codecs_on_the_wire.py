"""What codecs say they send, held to the byte counters of real links."""

import pytest
import torch

from paceline.comm import Group, LocalGroup, join
from paceline.compression import Codec
from paceline.registry import list_variants
from paceline.replica.replica import Replica
from paceline.sync import EveryStep
from paceline.testing.netlab import Netlab, netlab_missing, read_counters

NUM_STEPS = 3
SHAPES = {"matrix": (600, 500), "vector": (3000,), "bias": (64,)}


class Parameters(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())


def begin(group: Group, codec: str) -> Replica:
    """Return a replica after its first steps, which open connections and compile kernels."""
    module = Parameters()
    replica = Replica(module, torch.optim.SGD(module.parameters(), lr=0.1), group=group, sync=EveryStep(codec=codec))
    for step in range(2):
        replica.backward(replica(step), weight=1.0)
        replica.update()
    return replica


def count_sent_bytes() -> dict[str, list[int]]:
    """Return, by codec, what a few steps should send and what the link's counter says was sent."""
    counted = {}
    with join() as group:
        for name in list_variants(Codec):
            replica = begin(group, name)
            group.barrier()
            before = read_counters().sent_bytes
            for step in range(NUM_STEPS):
                replica.backward(replica(step + 10 * group.rank), weight=1.0)
                replica.update()
            group.barrier()
            counted[name] = [NUM_STEPS * replica.wire_bytes, read_counters().sent_bytes - before]
            replica.close()
    return counted


@pytest.mark.slow
@pytest.mark.skipif(bool(netlab_missing()), reason=netlab_missing() or "a netlab can be made")
def test_links_carry_what_codecs_say_and_little_more():
    for name in list_variants(Codec):  # kernels are compiled once here, or each rank would do it
        LocalGroup.run(2, lambda group, name=name: begin(group, name).close())
    with Netlab(num_hosts=3, bandwidth_bits_per_s=1e9) as lab:
        results = lab.run(count_sent_bytes)
    for result in results:
        assert result.exit_code == 0, result.output
        for name, (said, sent) in result.value.items():
            assert sent >= said, (result.rank, name)
            # Headers, acknowledgements and control values; gloo's own all-reduce of halves sends a little more too.
            assert sent <= 1.25 * said + 40_000, (result.rank, name)
