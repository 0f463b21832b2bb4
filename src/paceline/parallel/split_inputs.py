"""Inputs of a model that has parts of its sequences: those with which it was compared with the whole one."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch import list_tensors
from paceline.errors import SettingsError
from paceline.parallel.mesh import Mesh

MASK = "attention_mask"
"""Name of the mask that models of the transformers library take: 0 for tokens that no other sees."""


@dataclass
class MaskCheck:
    """Check of the masks of batches, if some make a model another one with split sequences.

    For each forward with a mask ranks send each other their parts of it.
    """

    mesh: Mesh
    split: Callable[[Any], Any]
    """Function from a tensor of whole sequences to this rank's part."""
    refusals: Mapping[bool, str]
    """Refusal of masks that hide tokens before others, if True, and of those that hide any, if False."""

    def check(self, mask_BT: Tensor) -> None:
        """Raise `SettingsError` on all ranks if a mask, of which this one has a part, makes the model another one."""
        seen_BT = join_tokens(mask_BT != 0, self.mesh, self.split)
        is_found = {True: hides_before_others(seen_BT), False: not seen_BT.all()}
        for is_before, refusal in self.refusals.items():
            if is_found[is_before]:
                raise SettingsError(refusal)


def hides_before_others(seen_BT: Tensor) -> bool:
    """Return whether any token is hidden before one that is seen."""
    return bool((seen_BT[:, :-1] < seen_BT[:, 1:]).any())


def join_tokens(part_BT: Tensor, mesh: Mesh, split: Callable[[Any], Any]) -> Tensor:
    """Return what is true of which tokens of whole sequences; each rank of the context axis knows it of its own."""
    num_tokens = part_BT.shape[1] * mesh.size("context")
    whole_BT = torch.zeros(len(part_BT), num_tokens, device=part_BT.device)
    whole_BT[:, split(torch.arange(num_tokens, device=part_BT.device)[None])[0]] = part_BT.to(whole_BT)
    mesh.group("context").all_reduce(whole_BT, name="tokens that attention sees").wait()
    return whole_BT > 0


def name_inputs(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model that hold tensors, by the names of its forward's parameters."""
    signature = inspect.signature(forward)
    given = signature.bind_partial(*args, **kwargs).arguments
    by_name = [name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD and name in given]
    given |= {key: value for name in by_name for key, value in given.pop(name).items()}
    return {name: value for name, value in given.items() if list_tensors(value)}


@dataclass
class SplitState:
    """State of all modules of one model."""

    max_tokens: int
    """Largest number of a rank's tokens of each sequence: that of the sample."""
    size: int
    """Number of ranks that share each sequence."""
    inputs: Collection[str]
    """Names of the inputs of the sample."""
    num_tokens: int | None = None
    """Number of this rank's tokens of each sequence in the present forward, and its backward."""
    mask_check: MaskCheck | None = None
    """Check of the masks of batches, if not all are right."""

    def note_tokens(self, num_tokens: int) -> None:
        """Set the number of this rank's tokens, for which a model must do as it did on the sample."""
        if num_tokens > self.max_tokens:
            raise SettingsError(
                "sequences must be no longer than the sample's for a context axis, since a model may do otherwise then "
                f"(a window), but got {num_tokens} tokens a rank, and {self.max_tokens} of the sample; give "
                "parallelize a sample of the greatest length (a run takes the first of the data set), or set "
                "Layout(context=1) (--layout.context 1)"
            )
        self.num_tokens = num_tokens

    def check_inputs(self, given: Mapping[str, Any], positions: Collection[str]) -> None:
        """Raise `SettingsError` if a model gets inputs with which it was not compared.

        Args:
            given: Inputs, by name.
            positions: Names of those that it always gets.
        """
        if unknown := [name for name in given if name not in self.inputs and name not in positions]:
            raise SettingsError(
                f"inputs must be those of the sample for a context axis, whose parts are compared with the whole, but "
                f"got {unknown[0]}, which the sample does not have; give parallelize a sample with it (a mask may be "
                "of ones)"
            )
        if self.mask_check is not None and MASK in given:
            self.mask_check.check(given[MASK])
