"""What stays at a node, what is carried to it, and what no message carries."""

from functools import partial

import pytest
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from flwr.app import Message
from pytorch_lightning import Callback, LightningModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, RunningMean
from torchmetrics.classification import MulticlassRecall

from fl_lightning import ClientModule, FaultPolicy, FederatedLoop
from fl_lightning.aggregation import UpdateTransform
from fl_lightning.client.files import ClientFiles
from fl_lightning.client.records import decode, encode
from fl_lightning.client.store import hash_of
from fl_lightning.data import (
    Elsewhere,
    FederatedDataModule,
    FixedPartition,
    IIDPartition,
    OwnerPartition,
    PartitionInput,
    TensorSource,
)
from fl_lightning.federation.checks import check_carried
from fl_lightning.flower.apps import command_line, settings_of_node
from fl_lightning.flower.node import Node
from fl_lightning.flower.nodes import Nodes
from fl_lightning.flower.wire import from_records, part_of, to_records
from fl_lightning.members.faults import ClientError, FaultError
from fl_lightning.methods import MOON, SCAFFOLD, Ditto, FedAvg, FedRep, KnFu, Local
from tests.federation.test_callbacks_of_modules import ChangesOutputs, LogsByItself, SetsUp
from tests.federation.test_clients_by_own_steps import CLIENTS, MODULES, CountsInHooks, LogsMetrics, regression_data
from tests.flower.grid import GridHere, federate
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of
from tests.user_data import Dicts
from tests.user_modules import DictNet

CPU = torch.device("cpu")


def data(**settings):
    return toy_data((7, 12, 5), **settings)


def loop_of(kind, **settings):
    return FederatedLoop(kind(net=BatchNormNet, optimizer=sgd()), seed=3, **settings)


def files_of(folder):
    return sorted(path.name for path in folder.rglob("client_*"))


def assert_carried(make_loop, make_data, folder, rounds=3):
    """The federation gives the simulation's weights and rows."""
    plain = fit(None, rounds, make_data(), loop=make_loop())
    server, grid, _ = federate(make_loop, make_data, folder, rounds=rounds)
    assert equal(weights_of(plain), weights_of(server))
    assert plain.round_metrics == server.round_metrics
    return server, grid


# --- what stays at a node


def test_files_that_the_server_names_no_more_are_deleted(tmp_path):
    server, *_ = federate(lambda: loop_of(SCAFFOLD), data, tmp_path, rounds=4)
    for client_id in range(3):
        named = server.store.memory(client_id)["file"]
        assert [named] == files_of(tmp_path / str(client_id))[-1:]
        assert len(files_of(tmp_path / str(client_id))) == 2  # the last one, and the one that its round began with


def test_memory_goes_back_with_a_round_that_is_undone(tmp_path):
    class Fails(SCAFFOLD):
        def reply(self, exchange, local):
            reply = super().reply(exchange, local)
            if (self.context.client_id, local.round_idx) == (2, 1):
                raise RuntimeError("no")
            return reply

    server, _ = assert_carried(lambda: loop_of(Fails, faults=FaultPolicy(on_error="skip")), data, tmp_path)
    assert server.store.clients == {0, 1, 2}


def test_neither_memory_nor_personal_entries_cross(tmp_path):
    _, grid, _ = federate(lambda: loop_of(FedRep), data, tmp_path)
    for message in grid.log:
        content = from_records(message.content, CPU)
        for part in ("weights", "start"):
            assert not any(name.startswith("net.head") for name in content.get(part) or {})
        if content["head"].get("file") is not None:
            assert content.get("personal") is None


@pytest.mark.parametrize(("kind", "both_ways"), [(SCAFFOLD, True), (MOON, False)])
def test_no_memory_crosses(kind, both_ways, tmp_path):
    """What a client keeps is in no message; MOON's is the model that it sends, so in none that it is sent."""
    server, grid, _ = federate(lambda: loop_of(kind), data, tmp_path, rounds=3)
    messages = [m.content for m in grid.log if both_ways or "ask" in head_of(m)]
    crossed = {value.numpy().tobytes() for content in messages for value in leaves(from_records(content, CPU))}
    for client_id in range(3):
        (path,) = (tmp_path / str(client_id)).rglob(server.store.memory(client_id)["file"])
        kept = [value for value in leaves(decode(path.read_bytes())) if value.ndim > 1 and value.any()]
        assert kept
        assert not any(value.numpy().tobytes() in crossed for value in kept)


def test_of_knfu_no_weights_cross(tmp_path):
    def own():
        return FederatedLoop(KnFu(net=BatchNormNet, optimizer=sgd()), seed=3)

    server, grid, _ = federate(own, lambda: data(transfer_size=4, partition=IIDPartition()), tmp_path)
    assert all(not from_records(m.content, CPU).get("weights") for m in grid.log)
    weights = sum(value.nbytes for value in server.client.state_dict().values())
    first = [m for m in grid.log if from_records(m.content, CPU)["head"].get("file")]  # not the entries before training
    sizes = [sum(len(part.data) for part in m.content.array_records["fl_lightning"].values()) for m in first]
    tensors = [from_records(m.content, CPU) for m in first]
    assert sizes
    moved = [sum(v.nbytes for part in content.values() for v in leaves(part)) for content in tensors]
    assert max(moved) == 4 * 3 * 4 < weights  # 4 samples, 3 classes, float32


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [leaf for item in items for leaf in leaves(item)]


def test_a_file_that_is_gone_or_altered_is_told_of(tmp_path):
    server, *_ = federate(lambda: loop_of(SCAFFOLD), data, tmp_path)
    name = server.store.memory(0)["file"]
    (path,) = (tmp_path / "0").rglob(name)
    files = ClientFiles(path.parent, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="was altered"):
        files.read(name)
    path.unlink()
    for file in (name, "../../etc/passwd"):
        with pytest.raises(FileNotFoundError, match="client 0 needs its file"):
            files.read(file)
    with pytest.raises(ValueError, match="letters and digits"):
        Node(loop_of(SCAFFOLD), data(), 0, tmp_path / "0")._files_of("../run")


def test_frozen_entries_that_are_not_those_of_their_digest(tmp_path):
    files = ClientFiles(tmp_path, 0)
    entries = {"a": torch.ones(2)}
    digest = hash_of(encode(entries))
    with pytest.raises(ValueError, match="must be those of the digest"):
        files.shared(digest, {"a": torch.zeros(2)})
    assert equal(files.shared(digest, entries), files.shared(digest, None))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match="must be those of the digest"):
        files.shared(digest, None)
    with pytest.raises(ValueError, match="must be those of the digest"):
        files.shared("../secret", entries)


def test_a_node_refuses_a_model_that_is_not_finite(tmp_path):
    node = Node(loop_of(FedAvg), data(), 0, tmp_path)
    grid = federate(lambda: loop_of(FedAvg), data, tmp_path)[1]
    first = next(m for m in grid.log if "ask" in (head := head_of(m)) and head["ask"] == "train")
    content = from_records(first.content, CPU)
    content["weights"]["net.body.0.weight"][0] = torch.inf
    content["head"]["client_id"] = 0
    message = Message(to_records({name: part_of(part) for name, part in content.items()}), reply_to=first)
    assert "must be finite" in head_of(node.answer(message))["error"]


def head_of(message):
    return from_records(message.content, CPU)["head"]


# --- what is carried


class Frozen(FedAvg):
    """Nobody trains the first layer."""

    def build(self, num_classes, input_shape):
        super().build(num_classes, input_shape)
        self.net.body[0].requires_grad_(False)


def test_frozen_entries_are_the_simulations(tmp_path):
    def own():
        return loop_of(Frozen, evaluate_clients_every=4)

    _, grid = assert_carried(own, lambda: data(participation=0.7), tmp_path, rounds=4)
    contents = [from_records(message.content, CPU) for message in grid.log]
    asked = [content for content in contents if content["head"].get("ask") in ("train", "evaluate")]
    for client_id in range(3):  # once as weights, once as entries to be kept, and then no more
        moved = [c for c in asked if c["head"]["client_id"] == client_id]
        name = "net.body.0.weight"
        times = [name in (c["weights"] or {}) or name in (c["frozen"]["entries"] or c["start"]) for c in moved]
        assert sum(times) <= 2
        assert times == sorted(times, reverse=True)


def test_metrics_are_computed_where_the_clients_are(tmp_path):
    def own():
        metrics = {"recall": MulticlassRecall(num_classes=3)}
        return loop_of(FedAvg, metrics=metrics, evaluate_clients_every=1)

    server, _ = assert_carried(own, data, tmp_path)
    assert {"local/alma", "local/recall"} <= server.round_metrics.keys()


@pytest.mark.parametrize("around", [FedAvg, Local], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_clients_are_evaluated_by_their_modules_own_steps(tmp_path, kind, around):
    def make():
        return FederatedLoop(around(module=kind()), seed=3, evaluate_clients_every=1)

    server, _ = assert_carried(make, regression_data, tmp_path)
    here = fit(None, 3, regression_data(), loop=make())
    assert server.recorder.client_values == here.recorder.client_values
    assert len(server.recorder.client_values) == CLIENTS


class ReadsItsTrainer(CountsInHooks):
    """It logs what its Trainer says of the evaluation."""

    def validation_step(self, batch, batch_idx):
        self.log("error", self.error(batch))
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.log("batches", float(self.trainer.num_val_batches[0]))
        self.log("samples", float(len(self.trainer.val_dataloaders.dataset)))
        self.log("twice", self.trainer.callback_metrics["error"] * 2)


def test_a_module_reads_its_trainer_where_its_client_is_evaluated(tmp_path):
    def make():
        return FederatedLoop(ReadsItsTrainer(), seed=3, evaluate_clients_every=1)

    server, _ = assert_carried(make, regression_data, tmp_path)
    here = fit(None, 3, regression_data(), loop=make())
    assert server.recorder.client_values == here.recorder.client_values
    for values in here.recorder.client_values.values():
        assert values["local/twice"] == pytest.approx(2 * values["local/error"])


class MakesCallbacks(CountsInHooks):
    def configure_callbacks(self):
        return [ChangesOutputs(), SetsUp(), LogsByItself()]


def test_callbacks_of_a_module_act_where_its_client_is_evaluated(tmp_path):
    def make():
        return FederatedLoop(MakesCallbacks(), seed=3, evaluate_clients_every=1)

    server, _ = assert_carried(make, regression_data, tmp_path)
    assert {"local/top", "local/seen", "local/stage"} <= server.round_metrics.keys()


class Counts(LogsMetrics):
    """It logs metric objects in training, one of them within another and one under two names."""

    def __init__(self):
        super().__init__()
        self.in_training = nn.ModuleDict({"mae": MeanAbsoluteError(), "last": RunningMean(window=2)})
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.in_training["mae"].update(self.layer(batch[0]).squeeze(-1), batch[1])
        self.in_training["last"].update(loss)
        self.mean.update(loss)
        self.log("train/mean", self.mean)
        self.log("train/again", self.mean)
        self.log("train/mae", self.in_training["mae"])
        self.log("train/last", self.in_training["last"])
        return loss


class KeepsSamples(Counts):
    def __init__(self):
        super().__init__()
        self.mean = CatMetric()


class KeptElsewhere(Counts):
    def __init__(self):
        super().__init__()
        self.held = [MeanMetric()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.held[0].update(loss)
        self.log("train/held", self.held[0])
        return loss


@pytest.mark.parametrize("around", [FedAvg, SCAFFOLD, Ditto], ids=lambda kind: kind.__name__)
def test_metric_objects_count_at_the_nodes_and_are_joined_here(tmp_path, around):
    server, _ = assert_carried(lambda: FederatedLoop(around(module=Counts()), seed=3), regression_data, tmp_path)
    assert {"train/mean", "train/again", "train/mae", "train/last"} <= server.round_metrics.keys()
    assert server.recorder.directions["train/mae"] == "min"


@pytest.mark.parametrize(
    ("kind", "words"),
    [(KeepsSamples, "keeps the client's samples .value."), (KeptElsewhere, "must be a part of its module")],
)
def test_a_metric_object_that_cannot_be_sent_is_named(tmp_path, kind, words):
    with pytest.raises(FaultError, match=rf"metric object that a client logs in training .*{words}"):
        federate(lambda: FederatedLoop(FedAvg(module=kind()), seed=3), regression_data, tmp_path, rounds=1)


@pytest.mark.parametrize("make", [Local, KnFu], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("every", [1, 2])
def test_own_models_are_evaluated_in_the_answer_to_the_last_exchange(tmp_path, make, every):
    def mine():
        return data(transfer_size=9)

    server, grid = assert_carried(lambda: loop_of(make, evaluate_clients_every=every), mine, tmp_path, rounds=4)
    asked = [head_of(message)["ask"] for message in grid.log if "ask" in head_of(message)]
    assert "evaluate" not in asked
    assert asked.count("train") == 4 * 3 * len(make.exchanges)
    here = fit(None, 4, mine(), loop=loop_of(make, evaluate_clients_every=every))
    assert server.recorder.client_values == here.recorder.client_values


def test_a_client_that_did_not_train_is_asked_for_its_score(tmp_path):
    def some():
        return loop_of(Local, evaluate_clients_every=1)

    server, grid = assert_carried(some, lambda: data(cohort_size=1), tmp_path)
    asked = [head_of(message)["ask"] for message in grid.log if "ask" in head_of(message)]
    assert (asked.count("train"), asked.count("evaluate")) == (3, 3 * 2)
    assert server.round_metrics["local/alma"] >= 0


class Stacks(LightningModule):
    """A classifier that joins the losses of its batches, of which there must be some."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_validation_epoch_start(self):
        self.losses = []

    def validation_step(self, batch, batch_idx):
        self.losses.append(self.training_step(batch, batch_idx))

    def on_validation_epoch_end(self):
        self.log("val/loss", torch.stack(self.losses).mean())


def tested_without_class_2():
    """Three clients with a class each, and no test samples of the last one."""
    x = torch.randn(34, 4, generator=torch.Generator().manual_seed(0))
    source = TensorSource((x[:24], torch.arange(24) // 8), (x[24:], torch.arange(10) % 2), num_classes=3)
    parts = [list(range(start, start + 8)) for start in (0, 8, 16)]
    return FederatedDataModule(source, num_clients=3, partition=FixedPartition(parts), seed=1)


def test_a_client_without_test_samples_has_no_score_in_its_answer(tmp_path):
    server, _ = assert_carried(
        lambda: FederatedLoop(Local(module=Stacks()), seed=3), tested_without_class_2, tmp_path, rounds=2
    )
    assert server.recorder.client_values.keys() == {0, 1}


class FailsInTests(Stacks):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.current_epoch == 1 and 1 in batch[1]:
            raise ValueError("no test today")


@pytest.mark.parametrize("on_error", ["error", "skip"])
def test_a_client_that_cannot_be_tested_is_trained_all_the_same(on_error, tmp_path):
    def loop():
        return FederatedLoop(Local(module=FailsInTests()), seed=3, faults=FaultPolicy(on_error=on_error))

    if on_error == "error":
        with pytest.raises(ClientError, match=r"client 1 at node 101 failed in round 1: .*no test today"):
            federate(loop, tested_without_class_2, tmp_path)
        return
    server, *_ = federate(loop, tested_without_class_2, tmp_path, rounds=2)
    assert server.round_metrics["train/skipped"] == 0
    assert server.recorder.client_values.keys() == {0}
    assert server.store.memory(1)["file"].startswith("client_1_round_1")


class Halves(UpdateTransform):
    """Sends half of the way."""

    def on_client(self, update, broadcast):
        moved = {n: (v + broadcast.weights[n]) / 2 if v.is_floating_point() else v for n, v in update.weights.items()}
        return type(update)(**{**vars(update), "weights": moved})


def test_transforms_run_at_the_client(tmp_path):
    assert_carried(lambda: loop_of(FedAvg, transforms=[Halves()]), data, tmp_path)


class Watches(ClientModule):
    """Its learning rate follows the global loss."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "global/loss"}}


def test_factors_of_the_learning_rate_are_carried(tmp_path):
    server, _ = assert_carried(lambda: loop_of(Watches), data, tmp_path)
    assert server.engine.local.lr_factors[0][0] < 1


# --- what is refused at start


class Watcher(Callback):
    def on_client_end(self, trainer, loop, update):
        pass


class Remembers(Halves):
    def state_dict(self):
        return {}


def test_what_no_message_carries_is_refused_by_name():
    with pytest.raises(ValueError, match="Watcher looks at clients while they are trained"):
        carried(loop_of(FedAvg), callbacks=[Watcher()])
    with pytest.raises(ValueError, match="Remembers keeps a state over all clients"):
        carried(loop_of(FedAvg, transforms=[Remembers()]))
    with pytest.raises(ValueError, match="on_train_batch_end of a callback that the client makes"):
        check_carried([], ["on_validation_batch_end", "on_train_batch_end"], trainer(1))
    check_carried([], ["on_validation_batch_end"], trainer(1))


def carried(loop, **settings):
    parts = loop.parts
    check_carried(parts.transforms, list(parts.batch_hooks), trainer(1, **settings))


# --- who is there


def test_a_key_is_held_to_over_runs(tmp_path):
    keys = tmp_path / "keys.json"
    grid = GridHere({7: Node(loop_of(FedAvg), data(), 0, tmp_path).answer}, {7: b"a key"})
    settings = Node(loop_of(FedAvg), data(), 0, tmp_path).settings
    assert Nodes(grid, settings, 3, 1.0, 0.0, keys=keys).look() == 1
    grid.keys[7] = b"another key"
    with pytest.raises(FaultError, match="client 0 belongs to the key"):
        Nodes(grid, settings, 3, 1.0, 0.0, keys=keys).look()
    tolerant = Nodes(grid, settings, 3, 1.0, 0.0, tolerant=True, keys=keys)
    with pytest.raises(
        RuntimeError, match="1 clients must be there, and after 0 seconds there are 0; node 7: client 0"
    ):
        tolerant.wait(3, 0.0, 1)


def test_all_samples_are_the_owners():
    parts = OwnerPartition(1)(PartitionInput(4), 3, None)
    assert [len(part) for part in parts] == [0, 4, 0]
    with pytest.raises(ValueError, match=r"client_id must lie in \[0, 1\)"):
        OwnerPartition(1)(PartitionInput(4), 1, None)


def test_settings_of_a_node():
    class Context:
        run_config = {"arguments": "--trainer.max_epochs 2", "data": "/d/client_{client}/data.yaml"}
        node_config = {"partition-id": 4}

    assert settings_of_node(Context()) == ("--trainer.max_epochs 2", "/d/client_4/data.yaml", 4)
    assert command_line(("a.yaml",), "--x 1", "b.yaml") == ["fit", "-c", "a.yaml", "--x", "1", "-c", "b.yaml"]
    assert "--data.batch_size=8" in command_line((), "--data.batch_size=8 --data.num_clients 3", "b.yaml")
    for words in ("--data.source MNIST", "--data.by=user", "--data other.yaml"):
        with pytest.raises(ValueError, match="must leave to each party what its data are, but for num_clients"):
            command_line((), words, "b.yaml")
        assert command_line((), words, "")
    assert partial(command_line, ("a.yaml",))("", "") == ["fit", "-c", "a.yaml"]


def test_an_owner_reads_its_samples_by_a_data_module_of_its_own(tmp_path):
    def own(client_id):
        return FederatedDataModule(Dicts(), num_clients=2, partition=OwnerPartition(client_id), batch_size=5)

    def answers(given):
        nodes = [Node(loop(), own(client_id), client_id, tmp_path / str(client_id)) for client_id in range(2)]
        return {100 + node.client_id: node.answer for node in nodes}

    def loop():
        return FederatedLoop(DictNet(), seed=3)

    def servers():
        return FederatedDataModule(Elsewhere(tmp_path), num_clients=2, batch_size=5, num_classes=3, input_shape=(4,))

    server, _, nodes = federate(loop, servers, tmp_path, answers, rounds=1)
    whole = len(Dicts().train_dataloader().dataset)
    assert [nodes.sizes[client_id]["train"] for client_id in range(2)] == [whole, whole]
    assert server.round_metrics["comm/bytes_up"] == server.round_metrics["comm/bytes_down"] > 0
