"""A worker of torchft, one of several that train the same model; `bench resilience` starts it as a script.

    python torchft_worker.py NUMBER LOG NUM_WORKERS

Each is a replica group of one process, with a store of its own, as torchft wants it. Its log has a JSON line for each
update.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F


def main(number: int, log: str, num_workers: int) -> None:
    """Train until the last update."""
    from task import BATCH, STEPS, build, make_data  # type: ignore[import-not-found]  # beside this file
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, dict[str, object]]) -> None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"worker{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        timeout=timedelta(seconds=10),
    )
    parallel = DistributedDataParallel(manager, module)
    stepper = Optimizer(manager, optimizer)
    inputs, targets = make_data().tensors
    draw = torch.Generator().manual_seed(number)
    with open(log, "a", buffering=1) as file:
        while manager.current_step() < int(os.environ[STEPS]):
            stepper.zero_grad()
            chosen = torch.randint(len(inputs), (int(os.environ[BATCH]) // num_workers,), generator=draw)
            F.cross_entropy(parallel(inputs[chosen]), targets[chosen]).backward()
            before = manager.current_step()
            stepper.step()
            if manager.current_step() > before:
                line = {"time": time.time(), "step": manager.current_step(), "workers": manager.num_participants()}
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
