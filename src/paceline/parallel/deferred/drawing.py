"""Operations that draw random numbers, at the moments of a construction at which they did."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.deferred.generator import GENERATOR, cost
from paceline.parallel.deferred.stream import Moment, RandomStream

FILLS: Mapping[Any, str] = {
    torch.ops.aten.uniform_.default: "uniform_",
    torch.ops.aten.normal_.default: "normal_",
}
"""Operations that draw a fixed number of words an element, in the elements' order."""
BLIND = {
    *FILLS,
    torch.ops.aten.exponential_.default,
    torch.ops.aten.log_normal_.default,
    torch.ops.aten.cauchy_.default,
    torch.ops.aten.geometric_.default,
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.random_.default,
    getattr(torch.ops.aten.random_, "from"),
    torch.ops.aten.random_.to,
}
"""Operations that draw the same words whatever was in the tensor that they fill."""
GROUP = 16
"""Elements that torch's normal numbers are made from together."""


def draw_at(stream: RandomStream, moment: Moment | None, run: Callable[[], Any], num_words: int = 0) -> Any:
    """Run with the random generator at a moment; afterwards it is where it was.

    Args:
        stream: Stream of the moment.
        moment: Moment; None for what draws nothing.
        run: Function to run.
        num_words: Number of words that it draws, if that is known.
    """
    if moment is None:
        with torch.no_grad():
            return run()
    generator = GENERATOR
    kept = generator.get_state()
    generator.set_state(stream.find(moment))
    try:
        with torch.no_grad():
            result = run()
        if num_words:
            stream.note(Moment(moment.base, moment.num_words + num_words), generator.get_state())
        return result
    finally:
        generator.set_state(kept)


@cache
def fills_in_order(function: Any, dtype: torch.dtype) -> bool:
    """Whether a part of a filled tensor can be filled by itself; tried, since it depends on torch's kernels."""
    fill = getattr(Tensor, FILLS[function])
    words = cost(fill, dtype, 0)
    if words is None or words[1]:
        return False
    stream = RandomStream()
    moment = Moment(GENERATOR.get_state())
    whole, part = torch.empty(64 * GROUP, dtype=dtype), torch.empty(17 * GROUP, dtype=dtype)
    draw_at(stream, moment, lambda: fill(whole))
    draw_at(stream, Moment(moment.base, words[0] * 5 * GROUP), lambda: fill(part))
    return torch.equal(whole[5 * GROUP : 22 * GROUP], part)
