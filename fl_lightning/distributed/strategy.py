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


for suffix, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
    StrategyRegistry.register(
        f"client_parallel{suffix}",
        ClientParallelStrategy,
        description=f"federated clients spread over processes ({method})",
        override=True,
        start_method=method,
    )
