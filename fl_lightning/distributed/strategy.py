"""Strategy that spreads the clients of a round over processes; no gradient is ever synchronised."""

import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry


class ClientParallelStrategy(DDPStrategy):
    """Each process trains its share of the cohort; sums of weights cross once per exchange.

    Registered as `client_parallel` (one script per process), `client_parallel_spawn`, `client_parallel_fork` and
    `client_parallel_notebook` (processes started from the running one).
    """

    def configure_ddp(self) -> None:
        """Leave the module unwrapped.

        Raises:
            ValueError: if it synchronises BatchNorm, whose statistics belong to one client.
        """
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.lightning_module.modules()):  # type: ignore[union-attr]
            raise ValueError(
                "processes train different clients, whose BatchNorm must not be synchronised, got SyncBatchNorm; leave "
                "trainer.sync_batchnorm unset"
            )


for name, method in (
    ("client_parallel", "popen"),
    ("client_parallel_spawn", "spawn"),
    ("client_parallel_fork", "fork"),
    ("client_parallel_notebook", "fork"),
):
    StrategyRegistry.register(
        name,
        ClientParallelStrategy,
        description=f"federated clients spread over processes ({method})",
        override=True,
        start_method=method,
    )
