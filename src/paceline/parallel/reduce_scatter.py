"""A codec on the sharded axis, which makes the exchange of sharded gradients smaller."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from paceline.compression.codec import Codec, Flag, State, all_of
from paceline.compression.message import decode_blocks, encode_blocks, message_bytes
from paceline.errors import SettingsError
from paceline.parallel.fully_sharded import list_blocks, set_reduce_scatter
from paceline.parallel.local import local
from paceline.parallel.mesh import Mesh
from paceline.sync.reducer import Divisor


class CodedReduceScatter:
    """Sums the gradients of a sharded module through a codec with error feedback, block by block, in backward.

    Instead of FSDP2's reduce-scatter each rank encodes, for each other rank, that rank's part of every gradient, sends
    it by an all-to-all, and adds up the received parts, in fp32, in the order of ranks. It adds its own part unencoded.
    There is one site: the sender of a part keeps its residual, by parameter and destination. With a lossless codec it
    is the reduce-scatter, up to the order of summation.

    On the wire: `wire_bytes`, instead of 4 (n-1)/n bytes a parameter among n ranks; all rows are as long as the
    longest. In memory: residuals of all gradients but the rank's own part, 4 (n-1)/n bytes a parameter on
    EVERY rank (twice that for codecs that encode at owners too, such as int8), and as much again between a backward and
    its `commit`: much of what sharding saves. Prefer a codec between hosts, on sharded gradients: 4/n bytes.

    `roll_back` undoes a step that is skipped, if all backward passes since the last `commit` belong to it.
    If any rank's gradients are not finite the sum is NaN, even if signs or largest elements would hide it.

    Args:
        module: Module that `shard_module` returned; its blocks use this codec from now on.
        mesh: Mesh of the layout.
        codec: Codec of each part. It must carry no momentum, since a rank's own part would have none.
        seed: Random seed of the codecs.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, codec: Codec, *, seed: int = 0) -> None:
        if codec.carries_momentum:
            raise SettingsError(
                f"the codec inside the sharded axis must carry no momentum, but got {codec.name}; take top_k"
            )
        self.codec = codec
        self._seed = seed
        self._states: dict[str, State] = {}
        self._pending: dict[str, State] = {}
        self._divisor: Divisor = lambda: 1.0
        self._step, self._loss_scale = 0, 1.0
        self._flags = torch.zeros(2, device=mesh.world.device)
        sharded_group = mesh.group("sharded")
        blocks = list_blocks(module)
        parameters = dict(module.named_parameters())
        mine = {name: list(local(parameters[name]).shape) for names in blocks.values() for name in names}
        shapes = sharded_group.gather_documents(mine, name="shapes of shards")
        # Backward may run in another thread than the group's other operations.
        self._group = sharded_group.duplicate("sharded codec")
        self._blocks = {}
        for block, names in blocks.items():
            parts = [{f"{name}/{rank}": Size(theirs[name]) for name in names} for rank, theirs in enumerate(shapes)]
            self._blocks[block] = _BlockReduceScatter(self, parts)
            set_reduce_scatter(module, block, self._blocks[block])

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends in a backward pass that sums."""
        return sum((self._group.size - 1) * block.row_bytes for block in self._blocks.values())

    @property
    def residual_bytes(self) -> int:
        """Present size of the residuals."""
        kept = [*self._states.values(), *self._pending.values()]
        return sum(tensor.nbytes for state in kept for tensor in state.values())

    def arm(self, divisor: Divisor, step: int, loss_scale: float = 1.0) -> None:
        """Describe the gradients of the next backward pass that sums; equally on every rank.

        Args:
            divisor: Function that returns the divisor from numerators to gradients, so that residuals of one step have
                the right weight in any other. Called in backward.
            step: Number of updates done before.
            loss_scale: Scale of fp16's gradients, which stays in the sum.
        """
        self._divisor, self._step, self._loss_scale = divisor, step, loss_scale

    def commit(self) -> None:
        """Keep the residuals of all backward passes since the last `commit`: the optimizer has used their sums."""
        self._states |= self._pending
        self._pending = {}

    def roll_back(self) -> None:
        """Drop those residuals: the optimizer has not used their sums."""
        self._pending = {}

    def take_flags(self) -> Tensor:
        """Return whether gradients were not finite, and whether a sum of finite ones was not, since the last call."""
        flags, self._flags = self._flags, torch.zeros_like(self._flags)
        return flags.clamp(max=1)

    def state(self) -> dict[str, Tensor]:
        """Return this rank's residuals, as ``<parameter>/<destination>/<site>``."""
        return {f"{part}/{site}": kept for part, state in self._states.items() for site, kept in state.items()}

    def load_state(self, saved: Mapping[str, Tensor]) -> None:
        """Load residuals that this rank saved in the same layout: other shards have other residuals."""
        self._states = {}
        for name, kept in saved.items():
            part, _, site = name.rpartition("/")
            self._states[part] = {**self._states.get(part, {}), site: kept}

    def close(self) -> None:
        """Close the connections. The module must not run backward afterwards."""
        self._group.close()

    def reduce(self, block: "_BlockReduceScatter", output: Tensor, rows: Tensor) -> None:
        """Fill `output` with this rank's part of the sum of all ranks' gradients; row r of `rows` is for rank r."""
        scale = self._divisor() * self._loss_scale
        payload = torch.zeros(self._group.size, block.row_bytes, dtype=torch.uint8, device=rows.device)
        is_finite: Flag = True
        for rank in self._others():
            values = {part: value / scale for part, value in block.cut(rows[rank], rank).items()}
            states = self._states | self._pending
            message, done = encode_blocks(
                self.codec, values, states, step=self._step, seed=self._seed_of(self._group.rank)
            )
            payload[rank, : len(message)] = message
            self._pending |= {part: exchanged.state for part, exchanged in done.items()}
            is_finite = all_of([is_finite, *(exchanged.is_finite for exchanged in done.values())])
        payload[:, -1] = is_finite ^ True
        self._flags[0] += is_finite ^ True
        received = torch.empty_like(payload)
        self._group.all_to_all(received, payload, name="coded gradients").wait()
        self._add_up(block, output, rows[self._group.rank], received, scale)

    def _add_up(
        self, block: "_BlockReduceScatter", output: Tensor, own: Tensor, received: Tensor, scale: float | Tensor
    ) -> None:
        rank = self._group.rank
        shapes = block.parts[rank]
        zeros = partial(torch.zeros, dtype=torch.float32, device=output.device)
        totals = {part: zeros(shape) for part, shape in shapes.items()}
        for sender in range(self._group.size):
            if sender == rank:
                values: Mapping[str, Tensor] = block.cut(own, rank)
            else:
                message = received[sender, : message_bytes(self.codec, shapes)]
                decoded = decode_blocks(self.codec, message, shapes, step=self._step, seed=self._seed_of(sender))
                values = {part: value * scale for part, value in decoded.items()}
            for part, total in totals.items():
                total += values[part]
        is_own_bad = torch.stack([~value.isfinite().all() for value in block.cut(own, rank).values()]).any()
        is_sum_bad = torch.stack([~total.isfinite().all() for total in totals.values()]).any()
        self._flags[0] += is_own_bad
        # If nobody's part was not finite, the sum is too large.
        self._flags[1] += is_sum_bad & ~is_own_bad & ~received[:, -1].any()
        output.zero_()
        for part, place in block.cut(output, rank).items():
            place.copy_(totals[part])
        output.masked_fill_((received[:, -1] != 0).any(), torch.nan)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size) if rank != self._group.rank]

    def _seed_of(self, sender: int) -> int:
        """Return the seed of a sender: not all senders may round the same way."""
        return self._seed * self._group.size + sender


class _BlockReduceScatter(ReduceScatter):
    """The reduce-scatter of one block, as FSDP2 calls it.

    Args:
        owner: Object that does the work.
        parts: Shapes of each rank's parts of the parameters, in the order of gradients in a row.
    """

    def __init__(self, owner: CodedReduceScatter, parts: Sequence[Mapping[str, Size]]) -> None:
        self._owner = owner
        self.parts = parts
        # Rank 0 has the largest part of each parameter, and rows are padded to that.
        self._padded = [shape.numel() for shape in parts[0].values()]
        self.row_bytes = 1 + max(message_bytes(owner.codec, shapes) for shapes in parts)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._owner.reduce(self, output_tensor, input_tensor.view(len(self.parts), -1))
        return None

    def cut(self, row: Tensor, rank: int) -> dict[str, Tensor]:
        """Return the parts of a rank in a row, as views."""
        assert len(row) == sum(self._padded), "a row holds every parameter that requires a gradient"
        parts = row.split(self._padded)
        shapes = self.parts[rank]
        return {
            name: part[: shape.numel()].view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }
