"""BatchNorm: which modules mix the samples of a batch, and what becomes of a batch of one sample."""

from collections.abc import Sequence

from torch import nn

from fl_lightning.types import Phase

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixes_samples(net: nn.Module) -> bool:
    """True where a sample's output depends on its batch in eval mode too: BatchNorm without running statistics."""
    return any(isinstance(module, BATCH_NORMS) and module.running_mean is None for module in net.modules())


def leaves_out_last(norms: Sequence[nn.Module], size: int, batch_size: int, phase: Phase) -> bool:
    """True where a client's last batch is a single sample, which a net with BatchNorm leaves out.

    A client with one sample in all trains with BatchNorm in eval mode instead.

    Args:
        norms: of the client's net.
        size: its samples.
        batch_size: samples per batch.
        phase: in training.

    Raises:
        ValueError: `batch_size` is 1.
    """
    for module in norms if size == 1 else ():
        module.eval()
    if not norms or size == 1:
        return False
    if batch_size == 1:
        setting = "data.batch_size" if phase.batch_size is None else "the phase's batch_size"
        raise ValueError(f"batch_size must be at least 2 for a net with BatchNorm, got 1; raise {setting}")
    return size % batch_size == 1
