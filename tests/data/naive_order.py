"""The steps of a training, by lists of samples and nothing else: what loaders are compared with."""

import itertools


def walk(epochs, size_of, tail="short", num_steps=None):
    """Return the samples of each step.

    Args:
        epochs: The samples of each epoch; it may go on for ever where there are `num_steps`.
        size_of: Global batch of each step.
        tail: Treatment of an epoch's last samples, too few for a whole batch.
        num_steps: Number of steps, if epochs do not end it.
    """
    steps, left, epochs = [], [], iter(epochs)
    while num_steps is None or len(steps) < num_steps:
        size = size_of(len(steps))
        while len(left) < size and (tail == "join" or tail == "drop" or not left):
            following = next(epochs, None)
            if following is None:
                break
            left = [*(left if tail == "join" else []), *following]
        if not left or (tail == "drop" and len(left) < size):
            return steps
        steps.append(left[:size])
        left = left[size:]
    return steps


def positions_of(num_samples, num_epochs=None):
    """Return the positions of each epoch."""
    numbers = itertools.count() if num_epochs is None else range(num_epochs)
    return (range(epoch * num_samples, (epoch + 1) * num_samples) for epoch in numbers)


def batch_of(first, changes):
    """Return what returns the global batch of a step."""
    planned = sorted(changes)
    return lambda step: [first, *(batch for start, batch in planned if start <= step)][-1]
