"""Laws of the batches' hash: equal ids, equal numbers; what was not wholly seen has none."""

from __future__ import annotations

import torch

from normplugin.diagnostics.batches import BatchHash


def batch(first=0, pad=1.0):
    """A sample in fairseq's shape."""
    ids = torch.arange(first, first + 6).view(2, 3)
    net_input = {"src_tokens": ids, "mask": ids > pad}
    return {"id": ids[:, 0], "net_input": net_input, "weights": torch.full((2,), pad)}


def numbers(*firsts, interval=2, begun=0, pad=1.0):
    """The records' numbers of one run."""
    seen, found = BatchHash(interval, begun), {}
    for update, first in enumerate(firsts, begun + 1):
        seen.add([batch(first, pad), batch(first + 1, pad)])
        if update == 1 or update % interval == 0:
            found[update] = seen.take(update)
    return found


def test_equal_ids_have_equal_numbers():
    """Floats and masks say nothing of which batch it is."""
    assert numbers(0, 1, 2, 3) == numbers(0, 1, 2, 3, pad=2.0)
    assert len(set(numbers(0, 1, 2, 3).values())) == 3


def test_a_batch_between_two_records_counts():
    """The record behind it differs, the others do not; the order counts too."""
    one, other = numbers(0, 1, 2, 3, 4, 5), numbers(0, 1, 9, 3, 4, 5)
    assert [update for update in one if one[update] != other[update]] == [4]
    assert numbers(0, 1, 2, 3)[4] != numbers(0, 1, 3, 2)[4]


def test_batches_are_seen_as_they_are_asked_for():
    """Not one ahead: a record between two of them is of the first."""
    seen, added = BatchHash(1, 0), BatchHash(1, 0)
    batches = seen.watch(iter([batch(0), batch(1)]))
    for first in range(2):
        added.add(batch(first))
        assert next(batches)["id"][0] == first
        assert seen.take(first + 1) == added.take(first + 1) != 0


def test_what_a_resumed_run_did_not_see_is_unknown():
    """A checkpoint between two records: the first number behind it is None, the next is right."""
    whole = numbers(0, 1, 2, 3, 4, 5)
    assert numbers(3, 4, 5, begun=3) == {4: None, 6: whole[6]}
    assert numbers(2, 3, 4, 5, begun=2) == {4: whole[4], 6: whole[6]}


def test_a_record_that_was_put_off_has_no_number():
    """After an overflow the updates between two records are others."""
    seen = BatchHash(2, 0)
    seen.add(batch())
    assert seen.take(3) is None
    seen.add(batch())
    assert seen.take(4) is None
    seen.add(batch())
    assert seen.take(6) is not None
