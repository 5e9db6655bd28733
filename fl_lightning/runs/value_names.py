"""The names of logged values tell of what kind they are."""

from fl_lightning.metrics.history import BY_CLASS, PROMISED, UNPROTECTED

ERRORS = ("forgetting", "loss", "error", "mse", "mae", "mape", "perplexity", "nll", "/ce")
LOWER = (*ERRORS, "distance", "divergence", "drift", "epsilon")
"""Ends of keys, in lower case, whose values are better where they are lower."""

COST_PREFIXES = ("cost/", "comm/")
"""Beginnings of such keys."""


def is_accuracy(name: str) -> bool:
    """True for a key whose values are accuracies in [0, 1], as `global/acc` or a user's `val_acc`."""
    return name.endswith(("acc", "accuracy", "alma", "local/initial", "local/personalised"))


def is_loss(name: str) -> bool:
    """True for a key whose values are losses."""
    return name.endswith("loss")


def is_lower_better(key: str) -> bool:
    """True for losses, errors, forgetting and costs, under a module's own names too.

    >>> [is_lower_better(key) for key in ("val_mse", "val/MeanAbsoluteError", "val_loss/dataloader_idx_1", "val_f1")]
    [True, True, True, False]
    >>> [is_lower_better(key) for key in ("cost/seconds", "local/weight_divergence")]
    [True, True]
    """
    name = key.partition("/dataloader_idx_")[0]
    return is_loss(name) or name.lower().endswith(LOWER) or name.startswith(COST_PREFIXES)


def is_value(name: str) -> bool:
    """True for a key of the client's own: no bytes, no count of clients, no class, no budget."""
    key = name.removeprefix(UNPROTECTED)
    return BY_CLASS not in key and not key.startswith(("comm/", PROMISED)) and key != "train/skipped"
