"""`loop.client_model`: the user's module as a client would deploy it, and the global model."""

import csv
import re
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from fl_lightning import ClientModule, FederatedLoop, methods
from fl_lightning.aggregation import ServerModule
from fl_lightning.callbacks import ClasswiseReport, ClientCheckpoint, ClientsReport
from fl_lightning.client.forwarding import ClientHook
from fl_lightning.client.hooks import overridden
from fl_lightning.methods import Ditto, FedAvg, FedBN, FedRoD, Local
from tests.commands import TINY, refusal, say, working_in
from tests.federation.test_clients_by_own_steps import (
    CLIENTS,
    MODULES,
    QUIET,
    Base,
    LogsMetrics,
    fitted,
    plain,
    regression_data,
)
from tests.federation.test_evaluated_model import all_classes
from tests.toys import BatchNormNet, sgd, toy_data

pytestmark = pytest.mark.filterwarnings("ignore")


class Normalises(LogsMetrics):
    """It has an entry that FedBN keeps at the client, and a part in eval mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.fixed = nn.Dropout(0.5).eval()

    def training_step(self, batch, batch_idx):
        return self.error((self.fixed(self.norm(batch[0])), batch[1]))

    def validation_step(self, batch, batch_idx):
        super().validation_step((self.norm(batch[0]), batch[1]), batch_idx)


@pytest.mark.parametrize("around", [FedAvg, Local, Ditto, FedBN], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", [*MODULES, Normalises], ids=lambda kind: kind.__name__)
def test_plain_lightning_gives_the_values_of_the_row(kind, around):
    loop = fitted(around(module=kind()))
    before = {name: value.clone() for name, value in loop.state_dict().items()}
    for client_id, values in loop.recorder.client_values.items():
        model = loop.client_model(client_id)
        assert type(model) is kind
        found = {f"local/{name}": value for name, value in plain(model, loop.data, client_id).items()}
        assert found == pytest.approx(values, rel=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in loop.state_dict().items())


def test_the_copy_is_free_of_the_run():
    loop = fitted(FedBN(module=Normalises()))
    model = loop.client_model(1)
    assert model._trainer is None
    assert model.training
    assert not model.fixed.training
    assert int(model.mae.total) == 0
    with torch.no_grad():
        model.layer.weight.zero_()
    assert loop.client.module.layer.weight.any()
    fit = Trainer(max_epochs=1, **QUIET)
    data = regression_data()
    data.setup("fit")
    fit.fit(model, DataLoader(list(data.view(1, 0).batches("train", batch_size=4)), batch_size=None))


class CountsBatches(Callback):
    """It counts the batches that it sees, and logs how many they were."""

    def __init__(self):
        self.seen = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += 1
        self.log("seen", float(self.seen))


class CountsAsAPart(nn.Module, CountsBatches):
    def __init__(self):
        nn.Module.__init__(self)
        CountsBatches.__init__(self)


class KeepsItsCallback(LogsMetrics):
    """It keeps the callback that it makes: as an attribute, or as a part of its own."""

    def __init__(self, kind):
        super().__init__()
        self.counts = kind()

    def configure_callbacks(self):
        return [self.counts]


def reaches(thing, kind, seen):
    """Whether an attribute, an item or the object of a bound method leads from a thing to an object of a class."""
    if id(thing) in seen:
        return False
    seen[id(thing)] = thing
    if isinstance(thing, kind):
        return True
    if isinstance(thing, dict):
        found = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        found = list(thing)
    else:
        found = [getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
    return not isinstance(thing, type) and any(reaches(part, kind, seen) for part in found)


@pytest.mark.parametrize("client_id", [None, 1])
@pytest.mark.parametrize("kind", [CountsBatches, CountsAsAPart])
def test_a_callback_that_the_module_keeps_does_not_lead_to_the_run(kind, client_id):
    loop = fitted(FedAvg(module=KeepsItsCallback(kind)))
    logs = loop.client.module.counts.log
    model = loop.client_model(client_id)
    assert loop.client.module.counts.log == logs
    assert not reaches(model, (FederatedLoop, ClientModule, ClientHook), {})
    assert model.counts.log.__self__ is model
    before = model.counts.seen
    fit = Trainer(max_epochs=1, **QUIET)
    fit.fit(model, DataLoader(list(regression_batches()), batch_size=None))
    assert model.counts.seen - before == len(regression_batches())
    assert fit.callback_metrics["seen"] == model.counts.seen
    assert loop.client.module.counts.seen == before


def regression_batches():
    data = regression_data()
    data.setup("fit")
    return list(data.view(1, 0).batches("train", batch_size=4))


class ReturnsItsOutputs(LogsMetrics):
    def training_step(self, batch, batch_idx):
        answers = self.layer(batch[0])
        return {"loss": super().training_step(batch, batch_idx), "answers": answers}


class ReturnsByHand(ReturnsItsOutputs):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        found = super().training_step(batch, batch_idx)
        self.manual_backward(found["loss"])
        optimizer.step()
        return found


@pytest.mark.parametrize("kind", [ReturnsItsOutputs, ReturnsByHand])
def test_what_a_step_returns_is_gone_with_its_batch(kind):
    loop = fitted(FedAvg(module=kind()))
    assert not loop.client.outputs


def test_the_global_model():
    loop = fitted(FedAvg(module=LogsMetrics()))
    model = loop.client_model()
    assert torch.equal(model.layer.weight, loop.client.module.layer.weight)
    with pytest.raises(ValueError, match="client_model needs a client_id here, because there is no global model"):
        fitted(Local(module=LogsMetrics())).client_model()


@pytest.mark.parametrize("client_id", [-1, CLIENTS])
def test_there_is_no_such_client(client_id):
    with pytest.raises(ValueError, match=rf"client_id must lie in \[0, {CLIENTS}\), got {client_id}"):
        fitted(FedAvg(module=LogsMetrics())).client_model(client_id)


def test_before_a_trainer_has_set_the_loop_up():
    with pytest.raises(RuntimeError, match="before a Trainer has set it up"):
        FederatedLoop(Base()).client_model(0)


NETS = [kind for kind in all_classes(ClientModule) if kind.__name__ in methods.__all__]


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_the_model_of_every_method_has_the_accuracy_of_the_table(kind):
    try:
        client = kind(net=BatchNormNet, optimizer=sgd())
    except (TypeError, ValueError) as error:
        pytest.skip(f"{kind.__name__} has arguments that must be given: {error}")
    data = toy_data((8, 6, 9), transfer_size=9, proxy_size=6, partition=None)
    loop = FederatedLoop(client, seed=1, evaluate_clients_every=1)
    Trainer(max_epochs=2, **QUIET).fit(loop, datamodule=data)
    for client_id, values in loop.recorder.client_values.items():
        model = loop.client_model(client_id)
        assert isinstance(model, LightningModule)
        x, y = data.view(client_id, 0).all("test")
        with torch.no_grad():
            right = model.eval()(x).argmax(1) == y
        assert float(right.double().mean()) == pytest.approx(values["local/alma"]), kind
    check_note(loop)


def check_note(loop):
    """Assert that there is a note where clients deploy other models than the global one, or must fine-tune it first."""
    if not loop.evaluation.has_global:
        assert not loop.evaluation.note
        return
    x, _ = loop.data.split("test").all()
    with torch.no_grad():
        everywhere = loop.client_model().eval()(x)
        outputs = [loop.client_model(client_id).eval()(x) for client_id in range(loop.data.num_clients)]
    differs = any(not torch.allclose(output, everywhere, atol=1e-6) for output in outputs)
    if overridden(loop.server_module, "deployment", ServerModule) and loop.evaluation.note:
        return  # the server may give all clients one model, as IFCA's does where they choose alike
    assert bool(loop.evaluation.note) is (differs or loop.client.needs_fine_tuning)


def test_predict_and_the_report_say_that_they_take_the_global_model(tmp_path, caplog, capsys):
    for kind, has_note in ((Ditto, True), (FedAvg, False)):
        loop = FederatedLoop(kind(net=BatchNormNet, optimizer=sgd()), seed=1)
        runner = Trainer(max_epochs=1, callbacks=[ClasswiseReport()], **QUIET)
        runner.fit(loop, datamodule=toy_data((8, 8)))
        assert ("This is the global model; each client of Ditto" in capsys.readouterr().out) is has_note
        caplog.clear()
        with caplog.at_level("INFO"):
            runner.predict(loop, datamodule=toy_data((8, 8)))
        assert ("This is the global model; each client of Ditto" in caplog.text) is has_note
        caplog.clear()
        loop.deploy(0)
        runner.test(loop, datamodule=toy_data((8, 8)), verbose=False)
        runner.predict(loop, datamodule=toy_data((8, 8)))
        assert "This is the global model" not in capsys.readouterr().out + caplog.text


def test_a_head_of_its_own_is_in_the_model():
    loop = FederatedLoop(FedRoD(optimizer=sgd()), seed=1, evaluate_clients_every=1)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=toy_data((8, 8)))
    x, _ = loop.data.view(0, 0).all("test")
    outputs = [loop.client_model(client_id).eval()(x) for client_id in range(2)]
    assert not torch.equal(*outputs)


# --- files ---


@pytest.mark.parametrize("around", [FedAvg, Local, Ditto, FedBN], ids=lambda kind: kind.__name__)
def test_the_file_of_a_client_is_a_checkpoint_of_the_users_module(tmp_path, around):
    loop = fitted(around(module=Normalises()), callbacks=[ClientCheckpoint(tmp_path, clients="all")])
    for client_id, values in loop.recorder.client_values.items():
        model = Normalises.load_from_checkpoint(tmp_path / f"client-{client_id}.ckpt")
        found = {f"local/{name}": value for name, value in plain(model, loop.data, client_id).items()}
        assert found == pytest.approx(values, rel=1e-6)


def test_files_of_chosen_clients_only(tmp_path):
    fitted(Local(module=LogsMetrics()), callbacks=[ClientCheckpoint(tmp_path, clients=[2])])
    assert [path.name for path in tmp_path.iterdir()] == ["client-2.ckpt"]
    fitted(FedAvg(module=LogsMetrics()), callbacks=[ClientCheckpoint(tmp_path, clients=[0])])
    assert {path.name for path in tmp_path.iterdir()} == {"client.ckpt", "client-0.ckpt", "client-2.ckpt"}


def test_files_of_clients_that_there_are_not():
    with pytest.raises(
        ValueError, match=r"ClientCheckpoint.clients must be ids in \[0, 3\), names of clients or all, got \[0, 3\]"
    ):
        fitted(FedAvg(module=LogsMetrics()), callbacks=[ClientCheckpoint("nowhere", clients=[0, 3])])
    with pytest.raises(ValueError, match=r"ClientCheckpoint\.clients needs a federation"):
        Trainer(max_epochs=1, callbacks=[ClientCheckpoint("nowhere", clients="all")], **QUIET).fit(Base(), [])


def test_a_model_that_is_more_than_its_entries_is_not_written(tmp_path, caplog):
    caplog.set_level("INFO")
    loop = FederatedLoop(FedRoD(optimizer=sgd()), seed=1)
    run = Trainer(max_epochs=1, callbacks=[ClientCheckpoint(tmp_path, clients=[1])], **QUIET)
    run.fit(loop, datamodule=toy_data((8, 8)))
    assert [path.name for path in tmp_path.iterdir()] == ["client.ckpt"]
    assert "client-1.ckpt is not written: FedRoD predicts with more than the entries" in caplog.text


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = say(
        f"fit {TINY} --trainer.max_epochs 1 --model.client FedBN --trainer.callbacks ClientCheckpoint "
        f"--trainer.callbacks.clients [3]"
    )
    assert said.code == 0, said.err
    assert {path.name for path in tmp_path.rglob("client*.ckpt")} == {
        "client.ckpt",
        "client-3.ckpt",
        "client-best-on-test.ckpt",
    }
    assert len({path.parent for path in tmp_path.rglob("client*.ckpt")}) == 1


# --- Lightning's own passes ---


@pytest.mark.parametrize("around", [FedAvg, Local, Ditto, FedBN], ids=lambda kind: kind.__name__)
def test_a_pass_of_the_trainer_takes_the_model_and_the_samples_of_a_client(tmp_path, around):
    class Both(Normalises):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.test_step(batch, batch_idx)

        def test_step(self, batch, batch_idx):
            self.log("mse", self.error((self.norm(batch[0]), batch[1])))

        def predict_step(self, batch, batch_idx):
            return self.layer(self.norm(batch[0]))

    loop = fitted(around(module=Both()))
    values = loop.recorder.client_values
    loop.trainer.save_checkpoint(tmp_path / "last.ckpt")
    before = {name: value.clone() for name, value in loop.state_dict().items()}
    for client_id in range(CLIENTS):
        loop.deploy(client_id)
        for kind in ("validate", "test"):
            run = Trainer(**QUIET)
            (found,) = getattr(run, kind)(
                loop, datamodule=regression_data(), verbose=False, ckpt_path=tmp_path / "last.ckpt"
            )
            expected = {name: values[client_id][f"local/{name}"] for name in found}
            assert "mse" in found
            assert found == pytest.approx(expected)
        data = regression_data()
        outputs = Trainer(**QUIET).predict(loop, datamodule=data, ckpt_path=tmp_path / "last.ckpt")
        x, _ = data.view(client_id, 0).all("test")
        expected = loop.client_model(client_id).eval().predict_step((x, None), 0)
        assert torch.allclose(torch.cat(outputs), expected, atol=1e-6)
        assert all(torch.equal(value, before[name]) for name, value in loop.state_dict().items())
    loop.deploy(None)
    if around is not Local:
        (found,) = Trainer(**QUIET).test(loop, datamodule=regression_data(), verbose=False)
        assert found["mse"] == pytest.approx(loop.round_metrics["mse"])


def test_a_fit_takes_the_global_model_all_the_same():
    plain_loop = fitted(FedBN(module=Normalises()))
    loop = FederatedLoop(FedBN(module=Normalises()), seed=1, evaluate_clients_every=1)
    loop.deploy(1)
    Trainer(max_epochs=2, **QUIET).fit(loop, datamodule=regression_data())
    assert loop.round_metrics == plain_loop.round_metrics


def test_a_client_that_cannot_be_tested_is_refused():
    loop = fitted(FedAvg(module=LogsMetrics()))
    loop.deploy(9)
    with pytest.raises(ValueError, match=r"client must lie in \[0, 3\), got 9; give one of these ids"):
        Trainer(**QUIET).validate(loop, datamodule=regression_data())


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("client", ["FedBN", "Local", "FedRoD"])
def test_the_command_line_tests_a_client(tmp_path, monkeypatch, client):
    monkeypatch.chdir(tmp_path)
    words = f"{TINY} --model.client {client}"
    said = say(f"fit {words} --trainer.max_epochs 1 --model.evaluate_clients_every 1")
    assert said.code == 0, said.err
    (path,) = tmp_path.rglob("clients.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = {int(row["client"]): float(row["local/alma"]) for row in csv.DictReader(file)}
    for client_id in (0, 3):
        said = say(f"test {words} --ckpt_path last --client {client_id}")
        assert said.code == 0, said.err
        (printed,) = re.findall(r"test/acc +([\d.]+)", said.out)
        assert float(printed) == pytest.approx(rows[client_id], abs=1e-5)
        assert say(f"predict {words} --ckpt_path last --client {client_id}").code == 0
    refused = refusal(f"test {words} --ckpt_path last --client 7", 1)
    assert "client must be the id of a client in [0, 4), got 7" in refused


class KeepsBuffer(Base):
    """Its value is a buffer that a client keeps (`model.keep`)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.seen += batch[1].abs().sum()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("seen", self.seen, batch_size=1)

    test_step = validation_step


def test_a_pass_takes_the_buffers_that_a_client_keeps():
    loop = fitted(FedAvg(module=KeepsBuffer()), keep="*seen")
    values = loop.recorder.client_values
    loop.deploy(1)
    for kind in ("test", "validate"):
        run = Trainer(**QUIET)
        (found,) = getattr(run, kind)(loop, datamodule=regression_data(), verbose=False)
        assert found["seen"] == pytest.approx(values[1]["local/seen"])
        assert run.datamodule.tested_client is None
    assert float(loop.client_model(1).seen) == pytest.approx(values[1]["local/seen"])


def test_a_test_of_a_client_without_the_step_is_refused():
    loop = fitted(FedAvg(module=LogsMetrics()))
    loop.deploy(1)
    with pytest.raises(ValueError, match=r"client 1 can be evaluated only by a test_step of LogsMetrics or by"):
        Trainer(**QUIET).test(loop, datamodule=regression_data())


def test_a_copy_computes_over_all_processes_and_has_the_users_modes_within_an_evaluation():
    class Looks(Callback):
        found = None

        def on_validation_end(self, trainer, loop):
            if trainer.current_epoch == 1:
                Looks.found = loop.client_model(1)

    fresh = LogsMetrics()
    loop = fitted(FedAvg(module=LogsMetrics()), callbacks=[Looks()])
    for model in (Looks.found, loop.client_model()):
        assert model.training
        assert model.mae.distributed_available_fn == fresh.mae.distributed_available_fn
    assert not [part for part in loop.client.modules() if not part.training]


# --- all clients ---


@pytest.mark.parametrize("around", [FedAvg, Ditto, Local], ids=lambda kind: kind.__name__)
def test_a_test_of_all_clients_has_the_values_of_each(around):
    loop = fitted(around(module=LogsMetrics()))
    expected = {client_id: dict(values) for client_id, values in loop.recorder.client_values.items()}
    means = {key: value for key, value in loop.round_metrics.items() if key.startswith("local/")}
    runner = Trainer(**QUIET)
    loop.deploy("all")
    (found,) = runner.validate(loop, datamodule=regression_data(), verbose=False)
    assert loop.recorder.client_values == expected
    assert {key: value for key, value in found.items() if key.startswith("local/")} == pytest.approx(means)
    loop.deploy(None)
    (found,) = runner.validate(loop, datamodule=regression_data(), verbose=False)
    assert any(key.startswith("local/") for key in found) is (around is Local)


class SaysWhoRuns(Base):
    """It keeps what its Trainer says of who runs the evaluation."""

    def __init__(self):
        super().__init__()
        self.said = []

    def validation_step(self, batch, batch_idx):
        self.said.append(self.trainer.state.fn.value)
        self.log("mse", self.error(batch))

    test_step = validation_step


def test_modules_see_which_function_of_the_trainer_evaluates_them():
    loop = FederatedLoop(FedAvg(module=SaysWhoRuns()), seed=1, evaluate_clients_every=1)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=regression_data())
    said = loop.client.module.said
    assert set(said) == {"fit"}
    loop.deploy("all")
    for verb in ("validate", "test"):
        said.clear()
        getattr(Trainer(**QUIET), verb)(loop, datamodule=regression_data(), verbose=False)
        assert set(said) == {verb}


def test_the_report_of_clients_has_no_values_of_an_earlier_evaluation(tmp_path, capsys):
    loop = fitted(FedAvg(module=SaysWhoRuns()))
    runner = Trainer(callbacks=[ClientsReport(tmp_path)], **QUIET)
    runner.test(loop, datamodule=regression_data(), verbose=False)
    loop.deploy(1)
    runner.test(loop, datamodule=regression_data(), verbose=False)
    assert not list(tmp_path.iterdir())
    assert "Models of the clients" not in capsys.readouterr().out
    loop.deploy("all")
    runner.test(loop, datamodule=regression_data(), verbose=False)
    assert [path.name for path in tmp_path.iterdir()] == ["clients-test.csv"]


def test_an_evaluation_of_all_clients_that_has_none_is_refused():
    runner = Trainer(**QUIET)
    loop = fitted(FedAvg(module=LogsMetrics()))
    with pytest.raises(ValueError, match="tuned needs one client, got all of them"):
        loop.deploy("all", tuned=True)
    loop.deploy("all")
    with pytest.raises(ValueError, match="predict takes one client at a time, got all"):
        runner.predict(loop, datamodule=regression_data())
    pooled = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
    pooled.deploy("all")
    with pytest.raises(
        ValueError, match="client all needs several clients, and all samples of FedAvg are in one place"
    ):
        runner.test(pooled, datamodule=toy_data((8, 8), pooled=True))
    without = FederatedLoop(FedAvg(module=Base()))
    without.deploy("all")
    with pytest.raises(ValueError, match="client all needs a validation_step or test_step of Base"):
        runner.test(without, datamodule=regression_data())


def test_the_command_line_tests_all_clients(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ditto = f"{TINY} --model.client Ditto --model.evaluate_clients_every 1"
    assert say(f"fit {ditto} --trainer.max_epochs 1 --plots.format none").code == 0
    (run,) = tmp_path.glob("runs/*/*")
    with (run / "clients.csv").open(newline="") as file:
        expected = {row["client"]: row["local/alma"] for row in csv.DictReader(file)}
    for verb in ("test", "validate"):
        said = say(f"{verb} {ditto} --ckpt_path last --client all")
        assert said.code == 0
        assert "Models of the clients, each on its own test samples" in said.out
        with (run / f"clients-{verb}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["client"]: row["local/alma"] for row in rows} == expected
        assert all(int(row["samples"]) > 0 for row in rows)
    said = say(f"predict {ditto} --ckpt_path last --client all")
    assert said.code == 0
    with (run / "predictions-clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    outputs = torch.load(run / "predictions-clients.pt")
    assert {name: len(output) for name, output in outputs.items()} == {
        name: sum(row["client"] == name for row in rows) for name in expected
    }
    for client_id in ("0", "1"):
        assert say(f"predict {ditto} --ckpt_path last --client {client_id} --output {client_id}.csv").code == 0
        assert torch.equal(torch.load(tmp_path / f"{client_id}.pt"), outputs[client_id])
    assert "client" in refusal(f"test {ditto} --ckpt_path last --client every", 1)


ASKS_ITS_TRAINER = """
import torch
from pytorch_lightning import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

class Asks(LightningDataModule):
    def setup(self, stage):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        self.samples = TensorDataset(x, torch.arange(16) % 2)
        assert self.trainer.world_size == 1

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4)

    test_dataloader = val_dataloader = train_dataloader
"""


def test_predictions_of_all_clients_by_a_data_module_that_asks_its_trainer(tmp_path):
    with working_in(tmp_path, ASKS_ITS_TRAINER):
        settings = "--model.client FedBN --model.client.net Perceptron --data.source own.Asks --data.num_clients 2"
        settings += " --trainer.accelerator cpu"
        assert say(f"fit {settings} --trainer.max_epochs 1 --plots.format none").code == 0
        said = say(f"predict {settings} --ckpt_path last --client all --output all.csv")
        assert said.code == 0, said.err
        with Path("all.csv").open(newline="") as file:
            assert [row["client"] for row in csv.DictReader(file)] == ["0"] * 8 + ["1"] * 8


# --- modules that Python cannot copy ---


class Uncopied(LogsMetrics):
    """It keeps a generator, and after its training a tensor of the graph of gradients."""

    def __init__(self):
        super().__init__()
        self.stream = iter(range(10))
        self.lines = (number for number in range(3))

    def training_step(self, batch, batch_idx):
        self.last = super().training_step(batch, batch_idx)
        return self.last


@pytest.mark.parametrize("around", [FedAvg, Ditto, Local], ids=lambda kind: kind.__name__)
def test_files_of_clients_need_no_copy_of_the_module(tmp_path, around):
    loop = FederatedLoop(around(module=Uncopied()), seed=1, evaluate_clients_every=1)
    saves = ClientCheckpoint(tmp_path, clients="all")
    Trainer(max_epochs=2, callbacks=[saves], **QUIET).fit(loop, datamodule=regression_data())
    for client_id, values in loop.recorder.client_values.items():
        model = LogsMetrics.load_from_checkpoint(tmp_path / f"client-{client_id}.ckpt")
        found = {f"local/{name}": value for name, value in plain(model, loop.data, client_id).items()}
        assert found == pytest.approx(values, rel=1e-6)
    with pytest.raises(ValueError, match=r"client_model needs a module that copy.deepcopy copies, got Uncopied"):
        loop.client_model(0)
