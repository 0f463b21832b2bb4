"""How the learning rate follows the batch."""

import math
from typing import Literal

Scaling = Literal["none", "linear", "square_root"]


def scale(rule: Scaling, global_batch: int, base_batch: int) -> float:
    """Return the factor of the learning rate for a batch, when it was found with batches of `base_batch`.

    Args:
        rule: linear: in proportion to the batch, as many small steps would go as far (Krizhevsky 2014; Goyal 2017), for
            SGD; square_root: by the square root, which keeps the noise of an update (Hoffer 2017), for Adam and LAMB;
            none: 1.
        global_batch: Samples of a step, over all workers.
        base_batch: Likewise.
    """
    ratio = global_batch / base_batch
    return {"none": 1.0, "linear": ratio, "square_root": math.sqrt(ratio)}[rule]
