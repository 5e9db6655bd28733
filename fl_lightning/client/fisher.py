"""Fisher information of a client's parameters, estimated on its own samples."""

from typing import Literal

from fl_lightning.client.module import ClientModule
from fl_lightning.functional.importance import batch_fisher, importance, samples_at_once
from fl_lightning.functional.state import State
from fl_lightning.types import ClientData

Fisher = Literal["sample", "batch"]
"""The squared gradients whose mean is the estimate: those of samples or those of batches."""


def fisher_information(
    client: ClientModule, params: State, *, local: ClientData, kind: Fisher, max_samples: int
) -> State:
    """Estimate the diagonal of the Fisher information of a client's model as it is, in eval mode.

    Args:
        client: The client.
        params: The parameters at which the gradients are taken, by name.
        local: The client's data.
        kind: `sample`: the mean of the squared gradients of all samples. `batch`: that of the batches of the first
            local epoch, which is faster and up to the batch size times smaller.
        max_samples: The number of samples after which `batch` stops. The batch that passes it is the last.
    """
    if kind == "sample":
        batches = local.batches(batch_size=samples_at_once(params))
    else:
        batches = local.batches(epoch=0)
    with client.evaluation_mode():
        given = client.transfer_each(batches)
        if kind == "sample":
            return importance(client.loss_at, params, given, kind="square")
        return batch_fisher(client.loss_at, params, given, max_samples=max_samples)
