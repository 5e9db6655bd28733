"""Fine-tuning before a test at the nodes, and clients that never train, over a grid."""

import pytest
import torch
import yaml
from pytorch_lightning import Callback

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

import fl_lightning.cli.run_callbacks
from fl_lightning import FederatedLoop, FineTuning
from fl_lightning.aggregation import ServerModule
from fl_lightning.cli import split
from fl_lightning.flower.wire import WireError, plain_scoring, read_score, read_scoring
from fl_lightning.methods import IFCA, SCAFFOLD, Ditto, FedAMP, FedAvg, FedBN, FedFOMO, Local
from fl_lightning.types import Scoring
from tests.commands import CONFIGS, say
from tests.federation.test_clients_by_own_steps import LogsMetrics, regression_data
from tests.flower.grid import owners, serve
from tests.flower.test_methods import rows_of
from tests.flower.test_node import assert_carried
from tests.toys import fit, sgd, toy_data

pytestmark = pytest.mark.filterwarnings("ignore")

TUNED = FineTuning(epochs=2, trains=["*"], lr=0.2, batch_size="full")


KINDS = [FedAvg, FedBN, Ditto, SCAFFOLD, FedFOMO, FedAMP, IFCA]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_simulations_values(tmp_path, kind):
    def make_loop():
        return FederatedLoop(kind(optimizer=sgd()), seed=3, evaluate_clients_every=1, fine_tuning=TUNED)

    def make_data():
        return toy_data((7, 12, 5, 9), unseen=[1], participation=0.7)

    server, grid = assert_carried(make_loop, make_data, tmp_path)
    here = fit(None, 3, make_data(), loop=make_loop())
    assert server.recorder.client_values == here.recorder.client_values
    assert {"local/tuned/alma", "unseen/alma", "unseen/tuned/alma"} <= server.round_metrics.keys()
    assert not [message for message in grid.log if message.metadata.message_type == "train" and is_for(message, 101)]


class Shifts(ServerModule):
    """Gives every client a shift of its head, though the clients share nothing."""

    def deployment(self, client_id):
        return {"shift": torch.tensor([5.0, 0.0, 0.0])}


class Shifted(Local):
    server_class = Shifts

    def receive_deployment(self, extras, local):
        with torch.no_grad():
            self.net.head.bias.add_(extras["shift"])


def test_clients_that_share_nothing_are_tested_with_what_the_server_gives(tmp_path):
    """Without it nodes test their clients when they have trained them."""

    def make_loop(kind=Shifted):
        return FederatedLoop(kind(optimizer=sgd()), seed=3)

    server, _ = assert_carried(make_loop, toy_data, tmp_path)
    here = fit(None, 3, loop=make_loop())
    assert server.recorder.client_values == here.recorder.client_values
    plain = fit(None, 3, loop=make_loop(Local))
    assert plain.recorder.client_values != here.recorder.client_values


@pytest.mark.parametrize("kind", [FedAMP, IFCA], ids=lambda kind: kind.__name__)
def test_the_server_gives_a_node_what_its_client_deploys(tmp_path, kind):
    """The nodes do not know the models at the server, nor the initial one of a file."""
    first = fit(FedAvg(optimizer=sgd()), 1, toy_data())
    file = tmp_path / "first.ckpt"
    first.trainer.save_checkpoint(file)

    def make_loop():
        return FederatedLoop(kind(optimizer=sgd()), seed=3, evaluate_clients_every=1, initial_weights=file)

    def make_data():
        return toy_data((7, 12, 5, 9), schedule=[[0, 1], [0, 2], [0, 1]])

    server, _ = assert_carried(make_loop, make_data, tmp_path)
    here = fit(None, 3, make_data(), loop=make_loop())
    assert server.recorder.client_values == here.recorder.client_values


def test_owners_that_have_a_folder_each(tmp_path, monkeypatch):
    """The server names the clients that never train by their ids, which `split` writes into every party's file."""
    monkeypatch.setattr(fl_lightning.cli.run_callbacks, "RunPlots", lambda *_, **__: Callback())
    text = yaml.safe_dump(
        {
            "model": {"evaluate_clients_every": 1, "fine_tuning": {"epochs": 2, "lr": 0.1}},
            "trainer": {"max_epochs": 1, "accelerator": "cpu"},
        }
    )
    (tmp_path / "more.yaml").write_text(text)
    files = ["-c", f"{CONFIGS}/experiment/digits_fedavg.yaml", "-c", str(tmp_path / "more.yaml")]
    split.run([*files, "--data.unseen", "3", "--output", str(tmp_path / "nodes")])
    settings = yaml.safe_load((tmp_path / "nodes/server/data.yaml").read_text())["data"]
    assert len(settings["unseen"]) == 3
    rows = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        if place == "here":
            assert say(f"fit {' '.join(files)} --data.unseen 3").code == 0
        else:
            serve(["fit", *files, "-c", str(tmp_path / "nodes/server/data.yaml")], owners(files, tmp_path / "nodes"))
        rows.append(rows_of(tmp_path / place)[-1])
    assert rows[0] == rows[1]
    assert {"local/tuned/alma", "unseen/tuned/alma"} <= rows[0].keys()


def is_for(message, node_id):
    return message.metadata.dst_node_id == node_id


def test_a_module_of_the_users_and_its_metrics(tmp_path):
    def make_loop():
        client = FedAvg(module=LogsMetrics())
        return FederatedLoop(client, seed=3, evaluate_clients_every=1, fine_tuning=FineTuning(epochs=3))

    server, _ = assert_carried(make_loop, regression_data, tmp_path)
    assert server.recorder.directions["local/tuned/val/mae"] == "min"


def test_how_clients_are_tested_is_carried():
    how = Scoring("test", 8, True, tuning=TUNED)
    assert read_scoring(plain_scoring(how), None) == how
    plain = how._replace(tuning=None)
    assert read_scoring(plain_scoring(plain), None) == plain


@pytest.mark.parametrize("tuned", [None, 3, {"correct": 9.0, "num_samples": 9.0, "metrics": {}}], ids=str)
def test_a_second_score_that_is_none(tuned):
    head = {"correct": 3.0, "num_samples": 4.0, "metrics": {}, "tuned": tuned}
    with pytest.raises(WireError):
        read_score(head, client_id=0, most_samples=4, classifies=True, is_tuned=True)


def test_a_second_score_that_nobody_asked_for():
    head = {"correct": 3.0, "num_samples": 4.0, "metrics": {}}
    with pytest.raises(WireError, match="a score after fine-tuning must come where the server asks for it"):
        read_score({**head, "tuned": head}, client_id=0, most_samples=4, classifies=True)
