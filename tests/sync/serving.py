"""A server that is driven by hand, in one thread: who pushes what, and when, is as the test says."""

import torch

from paceline.comm.exchange import NOTHING, Header
from paceline.sync.parameter_server.pieces import share_out
from paceline.sync.parameter_server.server import Kind, Server
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.wire import Wire


class ByHand:
    """A server of one vector in float64, and the wires of its workers."""

    def __init__(self, rule, num_workers=2, learning_rate=0.1, start=(1.0, -2.0), make=torch.optim.SGD, **options):
        parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer = make([parameter], lr=learning_rate, **options)
        [pieces] = share_out({"x": parameter}, 1, may_cut=True)
        self.rule = rule
        self.shard = Shard(pieces, {"x": parameter}, optimizer)
        landing = rule.start_landing(num_workers, optimizer)
        self.server = Server(self.shard, landing, range(num_workers), rule.codec, rule.pull_codec, 0)
        self._push_wire, self._pull_wire = Wire(rule.codec, pieces, 2), Wire(rule.pull_codec, pieces)
        self.learning_rate = learning_rate
        self.clocks, self.versions = [0] * num_workers, [0] * num_workers
        self.have = [parameter.detach().clone() for _ in range(num_workers)]
        self.dropped = [False] * num_workers

    @property
    def x(self):
        return self.shard.values.tensors[0]

    def push(self, worker, value, mass=1.0):
        """Push, and return what waits for the pull."""
        body = self._push_wire.new_body()
        value = torch.as_tensor(value, dtype=torch.float64)
        self._push_wire.write(body, [value], [self.learning_rate, 1.0], {}, self.clocks[worker])
        header = Header(Kind.SWAP, self.clocks[worker], self.versions[worker], mass=mass, value=mass)
        wait = self.server.take(worker, header, body if mass else NOTHING)

        def pull():
            reply, body = wait()
            [tensor] = self._pull_wire.read(body, reply.clock)[0]
            self.have[worker] = tensor.clone() if self._pull_wire.is_exact else self.have[worker] + tensor
            self.clocks[worker], self.versions[worker] = reply.clock, reply.version
            self.dropped[worker] = reply.value > 0

        return pull

    def may_pull(self, worker):
        """Whether a worker that pushed has its parameters by now."""
        return worker not in self.server._tickets

    def swap(self, worker, value, mass=1.0):
        """Push and pull."""
        self.push(worker, value, mass)()
