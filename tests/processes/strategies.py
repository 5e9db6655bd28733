"""Settings of a Trainer that divides the clients between processes."""


def parallel(devices, strategy="client_parallel"):
    """Return the settings for a number of processes. There are none for a single process.

    Args:
        devices: Number of processes.
        strategy: Name of the strategy.
    """
    return {} if devices == 1 else {"strategy": strategy, "devices": devices}


def forked(devices):
    """Return the settings for a number of processes that are forked from the first one."""
    return parallel(devices, "client_parallel_fork")
