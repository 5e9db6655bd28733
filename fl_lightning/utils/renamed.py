"""Arguments that are gone: what to set in their place."""

FAULTS = ("nonfinite", "on_error", "max_update_norm", "min_clients", "client_timeout", "patience")

GONE: dict[str, str] = {name: f"set {{}}faults.{name}" for name in FAULTS} | {
    "weighting": "set {}aggregator.weighting, of the rule (fl_lightning.aggregation.Aggregator is the mean)",
    "alma_every": "set {}evaluate_clients_every",
    "plateau": "the server steps every ReduceLROnPlateau; a client without it leaves it out of configure_optimizers",
    "memory_format": "it is chosen; a module of your own keeps the layout that you give it",
    "compile": "torch.compile the module of your own, or a net, before it is given",
}
"""Arguments that FederatedLoop had, and the remedy; `{}` stands for what goes before names on the command line."""


def instead_of(kind: type, argument: str, prefix: str = "") -> str | None:
    """Look up what takes the place of a removed argument, or None for one that never was.

    >>> class FederatedLoop: ...
    >>> instead_of(FederatedLoop, "alma_every", "model."), instead_of(FederatedLoop, "client")
    ('set model.evaluate_clients_every', None)
    """
    remedy = GONE.get(argument) if "FederatedLoop" in [base.__name__ for base in kind.__mro__] else None
    return None if remedy is None else remedy.format(prefix)
