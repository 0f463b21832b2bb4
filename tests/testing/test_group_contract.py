"""A contract is worth something only if it refuses what breaks it: groups that are wrong in one way each."""

import pytest
import torch

from paceline.comm import LocalGroup
from paceline.comm.group import DoneWork
from paceline.testing import GROUP_CHECKS, check_group, check_words_of_failure


class LastBitGroup(LocalGroup):
    """Its sums differ in the last bit on one rank."""

    def all_reduce(self, tensor, *, name):
        super().all_reduce(tensor, name=name).wait()
        if self.rank == 1 and tensor.dtype == torch.float32 and tensor.numel() > 1000:
            tensor[7] = torch.nextafter(tensor[7], torch.tensor(float("inf")))
        return DoneWork()


class HalfGroup(LocalGroup):
    """It sums in half precision."""

    def all_reduce(self, tensor, *, name):
        short = tensor.half()
        super().all_reduce(short, name=name).wait()
        tensor.copy_(short)
        return DoneWork()


class LonelyGroup(LocalGroup):
    """Its sums are of one rank."""

    def all_reduce(self, tensor, *, name):
        return DoneWork()


class FiniteGroup(LocalGroup):
    """It hides what is not finite."""

    def all_reduce(self, tensor, *, name):
        tensor.nan_to_num_()
        return super().all_reduce(tensor, name=name)


class SourcelessGroup(LocalGroup):
    """It always copies from rank 0."""

    def broadcast(self, tensor, *, source=0, name):
        return super().broadcast(tensor, name=name)


class ReversedGroup(LocalGroup):
    """It gathers in the wrong order."""

    def all_gather(self, output, tensor, *, name):
        super().all_gather(output, tensor, name=name).wait()
        output.copy_(output.flip(0).clone())
        return DoneWork()


class AsciiGroup(LocalGroup):
    """Its documents lose what is not ASCII."""

    def gather_documents(self, document, *, name):
        if isinstance(document, str):
            document = document.encode("ascii", "ignore").decode()
        return super().gather_documents(document, name=name)


class OpenDoorGroup(LocalGroup):
    """Its barrier stops nobody."""

    def barrier(self, *, name="barrier"):
        pass


class DirtyGroup(LocalGroup):
    """Its buffers are not zeroed."""

    def allocate(self, num_elements, dtype):
        return super().allocate(num_elements, dtype) + 1


class OneBufferGroup(LocalGroup):
    """It hands out one buffer twice."""

    def allocate(self, num_elements, dtype):
        self.buffer = getattr(self, "buffer", super().allocate(num_elements, dtype))
        return self.buffer


class PrivateGroup(LocalGroup):
    """What it calls shared each rank has for itself."""

    @property
    def host_ranks(self):
        return list(range(self.size))

    def share(self, num_bytes):
        return {rank: torch.zeros(size, dtype=torch.uint8) for rank, size in num_bytes.items()}


class TransposedGroup(LocalGroup):
    """Its all-to-all hands everybody the same row."""

    def all_to_all(self, output, tensor, *, name):
        return super().all_to_all(output, tensor[:1].expand_as(tensor), name=name)


class ByteGroup(LocalGroup):
    """Its messages hold no more than a megabyte."""

    def send(self, tensor, destination, *, tag, name):
        short = tensor.clone()
        short.view(-1)[2**20 // tensor.element_size() :] = 0
        return super().send(short, destination, tag=tag, name=name)


class TaglessGroup(LocalGroup):
    """Its messages meet in the order in which they began."""

    def send(self, tensor, destination, *, tag, name):
        return super().send(tensor, destination, tag=0, name=name)

    def receive(self, tensor, source, *, tag, name):
        return super().receive(tensor, source, tag=0, name=name)


class LastFirstGroup(LocalGroup):
    """Of messages with one tag the last one is received first."""

    def _post_message(self, *arguments, **options):
        with self._room.changed:
            for waiting in self._room.messages.values():
                waiting.rotate(1)
            return super()._post_message(*arguments, **options)


class CopyingGroup(LocalGroup):
    """It receives into a copy of slices."""

    def receive(self, tensor, source, *, tag, name):
        return super().receive(tensor.clone() if tensor.storage_offset() else tensor, source, tag=tag, name=name)


class AnyPeerGroup(LocalGroup):
    """It takes any peer."""

    def check_message(self, peer, tag):
        pass


class SharedDuplicateGroup(LocalGroup):
    """It has one duplicate for all."""

    def duplicate(self, name):
        self.only = getattr(self, "only", None) or super().duplicate("only")
        return self.only


class OneThreadGroup(LocalGroup):
    """Its duplicates are itself."""

    def duplicate(self, name):
        return self


class LostEpochGroup(LocalGroup):
    """Its members disagree about the epoch."""

    def gather_documents(self, document, *, name):
        self.epoch = self.rank
        return super().gather_documents(document, name=name)


class WholeSubgroupGroup(LocalGroup):
    """Its subgroups are of everybody."""

    def subgroup(self, ranks, name):
        return super().subgroup(range(self.size), "everybody")


class UpperFirstGroup(LocalGroup):
    """On its links the upper rank is first."""

    def link(self, peer, name):
        link = super().link(peer, name)
        link.rank = 1 - link.rank
        return link


BROKEN = [
    (LastBitGroup, "sums_have_the_same_bits_on_every_rank"),
    (HalfGroup, "sums_are_exact"),
    (HalfGroup, "sums_have_the_same_bits_on_every_rank"),
    (LonelyGroup, "sums_are_exact"),
    (LonelyGroup, "operations_leave_the_rest_of_a_buffer_alone"),
    (FiniteGroup, "sums_keep_nan_and_infinity"),
    (SourcelessGroup, "broadcast_copies_each_source"),
    (SourcelessGroup, "many_operations_can_be_in_flight"),
    (ReversedGroup, "all_gather_keeps_the_order_of_ranks"),
    (AsciiGroup, "documents_of_any_length_arrive_whole"),
    (OpenDoorGroup, "barrier_holds_everybody_until_the_last"),
    (LostEpochGroup, "members_know_their_place"),
    (TransposedGroup, "all_to_all_swaps_rows"),
    (ByteGroup, "messages_arrive_whole"),
    (TaglessGroup, "messages_meet_by_tag"),
    (LastFirstGroup, "messages_of_one_tag_keep_their_order"),
    (CopyingGroup, "messages_leave_the_rest_of_a_buffer_alone"),
    (AnyPeerGroup, "messages_that_cannot_be_are_refused"),
    (SharedDuplicateGroup, "duplicates_are_apart"),
    (OneThreadGroup, "duplicates_run_in_other_threads"),
    (DirtyGroup, "allocated_buffers_are_zeroed_and_take_part"),
    (OneBufferGroup, "allocated_buffers_are_zeroed_and_take_part"),
    (PrivateGroup, "ranks_of_a_host_see_each_others_memory"),
    (WholeSubgroupGroup, "subgroups_are_apart"),
    (UpperFirstGroup, "links_carry_messages_both_ways"),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_group_that_breaks_the_contract_is_refused(broken, check):
    checks = {check.__name__: check for check in GROUP_CHECKS}
    with pytest.raises(AssertionError):
        broken.run(3, checks[check], timeout_s=5)


def test_every_check_refuses_something():
    assert {check for _, check in BROKEN} == {check.__name__ for check in GROUP_CHECKS}


def test_the_check_that_failed_is_named():
    with pytest.raises(AssertionError, match=r"^sums_are_exact: sum of \(\) torch.float64 must be "):
        LonelyGroup.run(3, check_group, timeout_s=5)


class SpeechlessGroup(LocalGroup):
    """Its errors have no text."""

    def all_reduce(self, tensor, *, name):
        raise NotImplementedError


def test_an_error_without_a_text_is_named_too():
    with pytest.raises(AssertionError, match=r"^sums_are_exact: NotImplementedError\(\)$"):
        SpeechlessGroup.run(2, check_group, timeout_s=5)


class SilentGroup(LocalGroup):
    """It does not tell why a rank stopped."""

    def close(self, error=None):
        super().close(ValueError("something") if error else None)


def test_a_group_that_keeps_the_cause_to_itself_is_refused():
    with pytest.raises(AssertionError, match="must say 'the disk is full'"):
        SilentGroup.run(2, check_words_of_failure, timeout_s=5)
