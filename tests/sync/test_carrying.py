"""Residuals over a change of the codec: every codec's can be carried by any reducer."""

import pytest
import torch

from paceline.compression import Codec, NoCodec
from paceline.registry import list_variants
from paceline.testing.lockstep import exchange_all

SHAPE = torch.Size((40, 30))


@pytest.mark.parametrize("name", sorted(set(list_variants(Codec)) - {"dgc"}))
def test_residuals_of_workers_add_up_to_what_all_hold_back(name):
    codec = list_variants(Codec)[name](dense_below=0)
    states = [{}] * 3
    for step in range(2):
        values = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(3)]
        states = [done.state for done in exchange_all(codec, values, states, step=step)]
    residuals = [codec.residual(state, SHAPE, rank, 3) for rank, state in enumerate(states)]
    held_back = codec.held_back(states, SHAPE)
    if isinstance(codec, NoCodec):
        assert residuals == [None] * 3
        return
    assert held_back.norm() > 0
    torch.testing.assert_close(sum(residuals), held_back)
    before = [{site: tensor.clone() for site, tensor in state.items()} for state in states]
    residuals[0].zero_()
    if "owner" in states[0]:
        torch.testing.assert_close(states[0]["worker"], before[0]["worker"])
