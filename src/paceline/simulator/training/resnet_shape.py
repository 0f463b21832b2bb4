"""Residual networks in closed form (He et al. 2016, with the stride on the middle convolution)."""

from typing import Literal

from pydantic import Field

from paceline.registry import register
from paceline.simulator.training.operators import Kind, Operators, Workload, WorkSlice
from paceline.simulator.training.shapes import ModelShape

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


@register("resnet")
class ResNetShape(ModelShape):
    """A residual network over images."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    """Layers with weights."""
    num_classes: int = Field(default=1000, ge=1)
    """Number of classes."""

    @property
    def reads_tokens(self) -> bool:
        """No: it reads images."""
        return False

    @property
    def num_blocks(self) -> int:
        """Its residual blocks."""
        return sum(_BLOCKS[self.depth])

    def list_convolutions(self, image: tuple[int, ...]) -> list[tuple[float, int, int, int]]:
        """Return (pixels of the output, channels in, channels out, kernel) of each convolution."""
        channels, height, width = image
        pixels = -(-height // 2) * -(-width // 2)
        found = [(float(pixels), channels, 64, 7)]
        pixels = -(-height // 4) * -(-width // 4)
        before = 64
        for stage, num_blocks in enumerate(_BLOCKS[self.depth]):
            inner = 64 * 2**stage
            out = inner * (4 if self.depth >= 50 else 1)
            for block in range(num_blocks):
                larger = float(pixels)
                if stage and not block:
                    pixels = -(-height // (8 << (stage - 1))) * -(-width // (8 << (stage - 1)))
                if self.depth >= 50:
                    found += [(larger, before, inner, 1), (pixels, inner, inner, 3), (pixels, inner, out, 1)]
                else:
                    found += [(pixels, before, inner, 3), (pixels, inner, out, 3)]
                if before != out:
                    found.append((pixels, before, out, 1))
                before = out
        return found

    def count(self, part: WorkSlice, image: tuple[int, ...]) -> Workload:
        """Return the operators: convolutions as products, norms and activations as bytes."""
        blocks, parameters, outputs = Operators(), 0.0, 0.0
        convolutions = self.list_convolutions(image)
        for pixels, before, after, kernel in convolutions:
            depth = before * kernel * kernel
            rows = part.samples * pixels
            # Pixels are read once, not unfolded.
            moved = rows * (before + after) * part.element_bytes
            shapes = ((rows, after, depth), (rows, depth, after), (depth, after, rows))
            for shape, count in zip(shapes, (1.0 + part.recomputed, 1.0, 1.0), strict=True):
                blocks.add_product(Kind.CONVOLUTION, *shape, element_bytes=0.0, count=count)
                blocks.num_bytes[-1] = moved
            parameters += depth * after + 2 * after
            outputs += pixels * after
        # Norm: two reads and a write, backward four and a write; activation: two and three; a third has a residual.
        blocks.add_bytes(Kind.POINTWISE, part.samples * outputs * part.element_bytes, 3 + 5 + 2 + 3 + 2)
        head = Operators()
        features = convolutions[-1][2]
        head.add_weight(
            Kind.MATRIX, part.samples, self.num_classes, features, element_bytes=part.element_bytes, forward=1.0
        )
        kept = part.samples * outputs * part.element_bytes * 2
        inputs = part.samples * convolutions[0][0] * 64 * part.element_bytes
        return Workload(
            blocks=blocks,
            head=head,
            block_parameters=parameters,
            embedding_parameters=0.0,
            head_parameters=features * self.num_classes,
            boundary_elements=part.samples * convolutions[-1][0] * features,
            block_reductions=0.0,
            context_elements=0.0,
            kernels=10.0 * len(convolutions),
            kept_bytes=kept,
            kept_scores_bytes=0.0,
            kept_inputs_bytes=inputs + kept / self.num_blocks,
            head_bytes=part.samples * self.num_classes * 12,
        )
