"""How the server turns client updates into the next global model."""

from fl_lightning.aggregation.aggregator import Aggregator, StateBuffers

__all__ = ["Aggregator", "StateBuffers"]
