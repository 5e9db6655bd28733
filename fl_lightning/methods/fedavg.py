"""FedAvg: train locally with the loss as it is, and take the mean of the weights by samples at the server.

Source: McMahan et al., AISTATS 2017, arXiv:1602.05629, Algorithm 1. Rule: `Aggregator`.
"""

from fl_lightning.client import ClientModule


class FedAvg(ClientModule):
    """Local loss: cross-entropy, or the wrapped module's own."""

    stackable = True
