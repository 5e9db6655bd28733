"""FedAvg: train locally with the loss as it is, and take the mean of the weights by samples at the server.

Source: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1. Rule: `Aggregator`.
"""

from fl_lightning.client import ClientModule


class FedAvg(ClientModule):
    """Trains with cross-entropy, or with the loss of the wrapped module."""

    stackable = True
