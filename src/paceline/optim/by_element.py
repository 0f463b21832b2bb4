"""Which of torch's optimizers may update a part of their parameters, or a part of one, apart from the rest."""

import torch

BY_ELEMENT = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers that update each element by its own gradient. A subclass may do otherwise: these classes only.

LARS, LAMB and Adafactor are not among them, since they need norms of whole parameters, nor is AdamW in 8 bits, whose
elements share their blocks' scales.
"""
