"""App of the server: Flower's own FedAvg."""

from client_app import net
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with all nodes."""
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
    )
