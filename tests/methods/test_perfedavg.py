"""Per-FedAvg."""
