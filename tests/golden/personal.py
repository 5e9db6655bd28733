"""Adapters of the personalised and clustered methods: APFL, Per-FedAvg, pFedMe, FedBABU, FedAMP, IFCA."""

from .end_to_end import Adapter

METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {}
