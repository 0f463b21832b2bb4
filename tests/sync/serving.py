"""A server that is driven by hand, in one thread: who pushes what, and when, is as the test says."""

import torch

from paceline.comm.rpc import NOTHING, RpcHeader
from paceline.sync import ASGD
from paceline.sync.parameter_server.blocks import partition_parameters
from paceline.sync.parameter_server.server import RequestKind, Server
from paceline.sync.parameter_server.shard import Shard
from paceline.sync.parameter_server.wire_format import WireFormat


def paper(**settings):
    """Return asynchronous SGD as in its paper, with what is given beyond it."""
    return ASGD(**{"rate_factor": 1.0, "correct_momentum": False, "least_momentum": 0.0, "warmup_steps": 0} | settings)


class ByHand:
    """A server of one vector in float64, and the wire formats of its workers."""

    def __init__(self, rule, num_workers=2, learning_rate=0.1, start=(1.0, -2.0), make=torch.optim.SGD, **options):
        parameter = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
        optimizer = make([parameter], lr=learning_rate, **options)
        [blocks] = partition_parameters({"x": parameter}, 1, may_cut=True)
        self.rule = rule
        self.shard = Shard(blocks, {"x": parameter}, optimizer)
        server_update = rule.start_server_update(num_workers, optimizer)
        self.server = Server(self.shard, server_update, range(num_workers), rule.codec, rule.pull_codec, 0)
        self._push_format, self._pull_format = WireFormat(rule.codec, blocks, 2), WireFormat(rule.pull_codec, blocks)
        self.learning_rate = learning_rate
        self.clocks, self.versions = [0] * num_workers, [0] * num_workers
        self.have = [parameter.detach().clone() for _ in range(num_workers)]
        self.dropped = [False] * num_workers

    @property
    def x(self):
        return self.shard.values.tensors[0]

    def push(self, worker, value, weight=1.0):
        """Push, and return what waits for the pull."""
        body = self._push_format.new_body()
        value = torch.as_tensor(value, dtype=torch.float64)
        self._push_format.write(body, [value], [self.learning_rate, 1.0], {}, self.clocks[worker])
        header = RpcHeader(RequestKind.SWAP, self.clocks[worker], self.versions[worker], weight=weight, value=weight)
        wait = self.server.handle(worker, header, body if weight else NOTHING)

        def pull():
            reply, body = wait()
            [tensor] = self._pull_format.read(body, reply.clock)[0]
            self.have[worker] = tensor.clone() if self._pull_format.is_exact else self.have[worker] + tensor
            self.clocks[worker], self.versions[worker] = reply.clock, reply.version
            self.dropped[worker] = reply.value > 0

        return pull

    def may_pull(self, worker):
        """Whether a worker that pushed has its parameters by now."""
        return worker not in self.server._tickets

    def swap(self, worker, value, weight=1.0):
        """Push and pull."""
        self.push(worker, value, weight)()
