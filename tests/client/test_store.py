"""The client store: the same run whether records lie in memory or in files, and no file that nobody needs."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import FederatedLoop
from fl_lightning.client.checkpoint_io import REGISTRY, names_needed, read_registry, registry_of
from fl_lightning.client.records import files_of
from fl_lightning.client.store import ClientStore, hash_of
from fl_lightning.methods import FedAvg, Local
from tests.toys import SIZES, BatchNormNet, equal, sgd, toy_data, trainer, weights_of

ROUNDS = 6
CPU = torch.device("cpu")
KB = 2**-10


class Remembering(FedAvg):
    """What a client keeps decides what it sends."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.memory.get("times", 0))

    def reply(self, exchange, local):
        self.memory["times"] = self.memory.get("times", 0) + 1
        self.memory["last"] = {name: value.detach() for name, value in self.trained().items()}
        return {}


def make_loop(threads=None, **store) -> FederatedLoop:
    client = Remembering(net=BatchNormNet, optimizer=sgd())
    kept = ClientStore(**store) if store else None
    return FederatedLoop(client, personal=["*body.1*"], seed=5, store=kept, threads=threads)


def make_data():
    return toy_data(participation=0.6)


def run(path, rounds=ROUNDS, ckpt_path=None, callbacks=(), **store) -> FederatedLoop:
    loop = make_loop(**store)
    settings = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks), "default_root_dir": path}
    trainer(rounds, **settings).fit(loop, datamodule=make_data(), ckpt_path=ckpt_path)
    return loop


def outcome(loop):
    records = {c: (loop.store.memory(c), loop.store.personal(c)) for c in range(len(SIZES))}
    return weights_of(loop), records


def assert_same(loop, other):
    (weights, records), (weights2, records2) = outcome(loop), outcome(other)
    assert equal(weights, weights2)
    for client_id, (memory, personal) in records.items():
        memory2, personal2 = records2[client_id]
        assert memory.get("times") == memory2.get("times")
        assert equal(memory.get("last", {}), memory2.get("last", {}))
        assert equal(personal or {}, personal2 or {})


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def needed(*checkpoints: Path) -> set[str]:
    return {name for path in checkpoints for name in names_needed(torch.load(path, weights_only=True))}


def checkpoints(folder: Path, **best) -> list[ModelCheckpoint]:
    last = ModelCheckpoint(folder, filename="last", save_top_k=1, monitor=None, enable_version_counter=False)
    keep = ModelCheckpoint(folder, filename="{epoch}", monitor="global/acc", mode="max", **best)
    return [last, keep]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    loop = run(path)
    assert not (path / "clients").exists()  # memory alone writes nothing
    return loop


@pytest.mark.parametrize("budget", [0, 2 * KB, 4096, None])
def test_the_budget_changes_nothing_but_where_records_lie(uninterrupted, tmp_path, budget):
    loop = run(tmp_path, memory_budget_mb=budget)
    files = names(tmp_path / "clients")
    assert bool(files) == (budget in (0, 2 * KB))
    assert_same(loop, uninterrupted)
    if files:  # of every client the newest alone, since no checkpoint was saved
        assert len(files) == len(loop.store.clients)
        assert loop.store._bytes <= max(budget * 2**20, 1000)


@pytest.mark.parametrize("after", ["memory", "files"])
@pytest.mark.parametrize("before", ["memory", "files"])
def test_resume_is_exact_from_memory_and_from_files(uninterrupted, tmp_path, before, after):
    budgets = {"memory": 4096, "files": 0}
    first = run(tmp_path, 3, memory_budget_mb=budgets[before])
    first.trainer.save_checkpoint(tmp_path / "at.ckpt")
    assert_same(run(tmp_path, ckpt_path=tmp_path / "at.ckpt", memory_budget_mb=budgets[after]), uninterrupted)


def test_resume_from_best_after_later_rounds_and_in_another_folder(uninterrupted, tmp_path):
    ckpt = tmp_path / "a" / "best.ckpt"

    class SaveAt(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, loop):
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(ckpt)

    run(tmp_path / "a", callbacks=[SaveAt()], memory_budget_mb=0)
    assert needed(ckpt) <= names(tmp_path / "a" / "clients")
    again = run(tmp_path / "a", ckpt_path=ckpt, memory_budget_mb=0)
    assert_same(again, uninterrupted)
    elsewhere = run(tmp_path / "b", ckpt_path=ckpt, memory_budget_mb=0)
    assert_same(elsewhere, uninterrupted)
    assert needed(ckpt) <= names(tmp_path / "a" / "clients")
    shutil.move(tmp_path / "a", tmp_path / "moved")
    moved = run(tmp_path / "c", ckpt_path=tmp_path / "moved" / "best.ckpt", memory_budget_mb=0)
    assert_same(moved, uninterrupted)


def test_files_that_no_checkpoint_needs_are_deleted(tmp_path):
    saved = tmp_path / "checkpoints"
    loop = run(tmp_path, callbacks=checkpoints(saved, save_top_k=2), memory_budget_mb=0)
    files = names(tmp_path / "clients")
    assert files == needed(*saved.glob("*.ckpt"))
    assert len(files) > len(loop.store.clients)  # the best one's are older
    # a process that continues knows what the checkpoints of the one before need
    run(tmp_path, ROUNDS + 2, saved / "last.ckpt", checkpoints(saved, save_top_k=2), memory_budget_mb=0)
    assert names(tmp_path / "clients") == needed(*saved.glob("*.ckpt"))
    for path in saved.glob("epoch*.ckpt"):
        path.unlink()
    last = checkpoints(saved, save_top_k=0)
    run(tmp_path, ROUNDS + 4, saved / "last.ckpt", last, memory_budget_mb=0)
    assert names(tmp_path / "clients") >= needed(*saved.glob("*.ckpt"))


def test_an_unreadable_checkpoint_keeps_every_file(tmp_path):
    saved = tmp_path / "checkpoints"
    run(tmp_path, 3, callbacks=checkpoints(saved, save_top_k=1), memory_budget_mb=0)
    before = names(tmp_path / "clients")
    (best,) = saved.glob("epoch*.ckpt")
    best.write_bytes(b"broken off")
    run(tmp_path, 5, saved / "last.ckpt", checkpoints(saved, save_top_k=0)[:1], memory_budget_mb=0)
    assert before <= names(tmp_path / "clients")


def test_a_checkpoint_holds_hashes_only(tmp_path):
    loop = run(tmp_path, 2, memory_budget_mb=0)
    state = loop.store.state_dict()
    assert state["records"] == {}
    for client_id, file in files_of(state).items():
        assert file.client_id == client_id
        content = (tmp_path / "clients" / file.name).read_bytes()
        assert (file.hash, file.bytes) == (hash_of(content), len(content))


def test_what_a_checkpoint_writes_follows_the_cohort(tmp_path):
    """With a run folder every record is written once, whatever the budget: a checkpoint names the others."""
    store = ClientStore()
    store.begin_fit(FakeTrainer(tmp_path, callbacks=True), CPU)
    sizes = []
    for round_idx in range(20):
        store.put({client_id: record(round_idx) for client_id in range(3 * round_idx, 3 * round_idx + 3)}, round_idx)
        before = names(tmp_path / "clients")
        assert len(before) == 3 * round_idx  # nothing is written where no checkpoint is saved
        state = store.state_dict()
        assert len(names(tmp_path / "clients") - before) == 3
        assert state["records"] == {}
        sizes.append(state["files"].nbytes)
    assert sizes == [3 * 40 * n for n in range(1, 21)]


def test_a_checkpoint_outside_the_run_needs_no_files(uninterrupted, tmp_path):
    class Copy(ModelCheckpoint):
        def on_train_epoch_end(self, trainer, loop):
            if trainer.current_epoch == 2:
                trainer.save_checkpoint(tmp_path / "elsewhere" / "at.ckpt")

    run(tmp_path / "run", 4, callbacks=[*checkpoints(tmp_path / "run" / "checkpoints", save_top_k=0)[:1], Copy()])
    assert names(tmp_path / "run" / "clients") == needed(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert needed(tmp_path / "elsewhere" / "at.ckpt") == set()
    shutil.rmtree(tmp_path / "run")
    assert_same(run(tmp_path / "again", ckpt_path=tmp_path / "elsewhere" / "at.ckpt"), uninterrupted)


@pytest.mark.parametrize(
    "forged",
    ["../../victim", "/etc/victim", "client_1_round_1_0123456789ab.safetensors/../../../victim", "s3://victim"],
)
def test_a_registry_deletes_and_reads_nothing_outside_its_run(tmp_path, forged):
    saved = tmp_path / "run" / "checkpoints"
    run(tmp_path / "run", 2, callbacks=checkpoints(saved, save_top_k=0)[:1], memory_budget_mb=0)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run" / "clients" / REGISTRY).write_text(registry_of([forged]))
    run(tmp_path / "run", 4, saved / "last.ckpt", checkpoints(saved, save_top_k=0)[:1], memory_budget_mb=0)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize(
    "broken", [b"", b"{", b"\xff\xfe", b"[1, {}]", b'{"a": 1}', b'{"checkpoints": ["../x"], "sha256": ""}']
)
def test_a_broken_registry_is_begun_anew(tmp_path, broken):
    saved = tmp_path / "checkpoints"
    run(tmp_path, 2, callbacks=checkpoints(saved, save_top_k=0)[:1], memory_budget_mb=0)
    (tmp_path / "clients" / REGISTRY).write_bytes(broken)
    run(tmp_path, 4, saved / "last.ckpt", checkpoints(saved, save_top_k=0)[:1], memory_budget_mb=0)
    assert read_registry(tmp_path / "clients" / REGISTRY) == ["../checkpoints/last.ckpt"]


@pytest.mark.parametrize("rounds", [2, 4])
def test_a_missing_or_altered_file_is_refused(tmp_path, rounds):
    first = run(tmp_path, 2, memory_budget_mb=0)
    first.trainer.save_checkpoint(tmp_path / "at.ckpt")
    path = next((tmp_path / "clients").glob("*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=rf"{path.name} was altered; restore it, or continue from another"):
        run(tmp_path, 4, tmp_path / "at.ckpt", memory_budget_mb=0)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"needs the file {path.name} of client \d, found neither in .* set"):
        run(tmp_path, 4, tmp_path / "at.ckpt", memory_budget_mb=0)


def test_an_evaluation_needs_no_files(tmp_path):
    first = run(tmp_path, 2, memory_budget_mb=0)
    first.trainer.save_checkpoint(tmp_path / "at.ckpt")
    shutil.rmtree(tmp_path / "clients")
    trainer(1).validate(make_loop(memory_budget_mb=0), make_data(), ckpt_path=tmp_path / "at.ckpt", verbose=False)


def test_a_folder_that_cannot_be_written_names_the_setting_and_keeps_the_round_whole(tmp_path):
    (tmp_path / "file").write_text("")
    loop = make_loop(memory_budget_mb=0, folder=tmp_path / "file" / "clients")
    with pytest.raises(OSError, match=r"the client store cannot write .*client_\d_round_0.* model.store.folder"):
        trainer(2).fit(loop, datamodule=make_data())
    assert not loop.store.clients


def record(value: float, entries: int = 256) -> tuple[dict, None]:
    return {"x": torch.full((entries,), float(value))}, None  # 1 kB


def test_what_was_used_last_stays_in_memory(tmp_path):
    store = ClientStore(memory_budget_mb=3 * KB, folder=tmp_path)
    for client_id in range(5):
        store.put({client_id: record(client_id)}, 0)
        assert bool(names(tmp_path)) == (client_id > 2)
    assert list(store._records) == [2, 3, 4]
    for path in tmp_path.iterdir():
        if path.name.startswith(("client_2", "client_4")):
            path.unlink()
    assert store.memory(2)["x"][0] == 2
    assert store.memory(0)["x"][0] == 0  # read, and 3 goes
    assert list(store._records) == [4, 2, 0]
    assert store.memory(4)["x"][0] == 4
    assert store._bytes == 3 * 1024


def test_a_copy_may_be_edited_and_a_record_may_become_empty(tmp_path):
    for budget in (0, None):
        store = ClientStore(memory_budget_mb=budget, folder=tmp_path)
        store.put({1: record(1.0)}, 0)
        store.memory(1)["x"].zero_()
        assert store.memory(1)["x"][0] == 1
        store.put({1: ({}, None)}, 1)
        assert store.memory(1) == {}
        assert not store.clients
        assert not names(tmp_path)


def test_a_round_that_cannot_be_kept_leaves_all_records():
    store = ClientStore()
    store.put({1: record(1.0)}, 0)
    with pytest.raises(TypeError, match=r"memory of client 2\['bad'\] must consist of"):
        store.put({1: record(2.0), 2: ({"bad": object()}, None)}, 1)
    assert store.memory(1)["x"][0] == 1


def test_the_cost_of_a_round_follows_its_cohort(tmp_path):
    store = ClientStore(memory_budget_mb=0, folder=tmp_path)
    written = []
    store._write = lambda *args, write=store._write: written.append(args[0]) or write(*args)
    for round_idx in range(20):
        written.clear()
        cohort = {client_id: record(round_idx, 4) for client_id in range(3 * round_idx, 3 * round_idx + 3)}
        store.put(cohort, round_idx)
        assert written == list(cohort)
    assert len(store.state_dict()["files"]) == 60


def test_a_round_enters_no_file_of_checkpoints(tmp_path):
    store = ClientStore(memory_budget_mb=0, folder=tmp_path)
    store.put({0: record(0.0)}, 0)
    entered = set()
    sys.setprofile(lambda frame, event, argument: entered.add(Path(frame.f_code.co_filename).name))
    try:
        store.record(0)
        store.put({0: record(1.0)}, 1)  # deletes the file of round 0, which no checkpoint names
    finally:
        sys.setprofile(None)
    assert [path.name[:16] for path in tmp_path.iterdir()] == ["client_0_round_1"]
    assert {"store.py", "records.py"} <= entered
    assert "checkpoint_io.py" not in entered


def by_turns(clients):
    return {client_id: client_id % 2 for client_id in clients}


def test_a_record_goes_to_the_rank_that_owns_it(tmp_path):
    store = ClientStore(memory_budget_mb=0, folder=tmp_path)
    store.put({c: record(c) for c in range(5)}, 0)
    other = ClientStore(memory_budget_mb=0, folder=tmp_path)
    other.load_state_dict(store.state_dict(), rank=1, assign=by_turns)
    assert other.clients == {1, 3}
    assert other.owners == {c: c % 2 for c in range(5)}
    assert other.memory(3)["x"][0] == 3


class FakeTrainer:
    """One of several nodes, as the store sees a Trainer."""

    def __init__(self, folder, is_global_zero=True, num_nodes=1, callbacks=False):
        self.num_nodes = num_nodes
        self.is_global_zero = is_global_zero
        self.log_dir = str(folder)
        self.ckpt_path = None
        self.loggers = []
        self.default_root_dir = str(folder)
        self.lightning_module = None
        self.checkpoint_callbacks = [None] * callbacks
        self.strategy = SimpleNamespace(barrier=self.barrier, checkpoint_io=None)
        self.barriers = 0

    def barrier(self, name):
        self.barriers += 1


@pytest.mark.parametrize("settings", [{"memory_budget_mb": 0}, {"folder": "given"}])
def test_several_nodes_need_a_folder_that_all_see(tmp_path, monkeypatch, settings):
    monkeypatch.chdir(tmp_path)
    store = ClientStore(**settings)
    node = FakeTrainer(tmp_path / "b", False, 2)
    with pytest.raises(ValueError, match=r"must be one that all of them see, .* set model.store.folder to a shared"):
        store.begin_fit(node, CPU)
    assert node.barriers == 2  # before it gave up
    ClientStore(**settings).begin_fit(FakeTrainer(tmp_path, True, 2), CPU)


def test_nodes_without_a_shared_folder_may_keep_all_in_memory(tmp_path):
    store = ClientStore(memory_budget_mb=2 * KB)
    store.begin_fit(FakeTrainer(tmp_path, False, 2), CPU)
    store.put({0: record(0.0)}, 0)
    with pytest.raises(ValueError, match="must be one that all of them see"):
        store.put({1: record(1.0), 2: record(2.0)}, 1)
    assert store.memory(0)["x"][0] == 0


@pytest.mark.parametrize("budget", [-1, float("nan")])
def test_a_budget_below_zero_is_refused(budget):
    with pytest.raises(ValueError, match=f"memory_budget_mb must be at least 0, got {budget}"):
        ClientStore(memory_budget_mb=budget)


def test_the_registry_is_only_written_for_files(tmp_path):
    for name, budget in (("m", None), ("f", 0)):
        saved = tmp_path / name / "checkpoints"
        run(tmp_path / name, 2, callbacks=checkpoints(saved, save_top_k=1), memory_budget_mb=budget)
    assert not (tmp_path / "m" / "clients").exists()
    assert (tmp_path / "f" / "clients" / REGISTRY).is_file()


def test_two_processes_write_the_files_that_one_does(tmp_path):
    """Each rank writes its clients' files; rank 0 collects; another number of processes continues exactly."""
    for name, devices in (("one", 1), ("two", 2), ("again", 1)):
        path = tmp_path / name
        loop = make_loop(memory_budget_mb=0, threads=1)
        settings = {"strategy": "client_parallel_fork", "devices": 2} if devices == 2 else {}
        settings |= {"callbacks": checkpoints(path / "ckpt", save_top_k=0)[:1], "enable_checkpointing": True}
        ckpt_path = tmp_path / "two" / "ckpt" / "last.ckpt" if name == "again" else None
        rounds = ROUNDS if name == "again" else 4
        trainer(rounds, path, **settings).fit(loop, datamodule=make_data(), ckpt_path=ckpt_path)
        if name != "again":
            assert names(path / "clients") == needed(path / "ckpt" / "last.ckpt")
    assert names(tmp_path / "one" / "clients") == names(tmp_path / "two" / "clients")
    assert_same(loop, run(tmp_path / "whole", memory_budget_mb=0))


@pytest.mark.parametrize("budget", [0, 3 * KB, None])
def test_clients_are_those_with_a_record_wherever_it_lies(tmp_path, budget):
    store = ClientStore(memory_budget_mb=budget, folder=tmp_path)
    assert store.clients == set()
    store.put({c: record(c) for c in range(5)} | {7: ({}, None)}, 0)
    assert store.clients == {0, 1, 2, 3, 4}
    store.put({1: ({}, None), 8: ({}, {"own": torch.zeros(1)})}, 1)
    assert store.clients == {0, 2, 3, 4, 8}
    assert store.clients == {*store.state_dict()["records"], *files_of(store.state_dict())}
    store.memory(0)
    assert store.memory(9) == {}
    assert store.personal(9) is None
    assert store.clients == {0, 2, 3, 4, 8}
    other = ClientStore(memory_budget_mb=budget, folder=tmp_path)
    other.load_state_dict(store.state_dict(), rank=0, assign=by_turns)
    assert other.clients == {0, 2, 4, 8}


def test_clients_that_keep_nothing_cost_nothing(tmp_path):
    store = ClientStore(memory_budget_mb=0, folder=tmp_path / "clients")
    store.put({client_id: ({}, None) for client_id in range(5)}, 0)
    assert not store.clients
    assert not (tmp_path / "clients").exists()


def test_a_record_without_a_file_is_never_released(tmp_path):
    """A checkpoint of two processes, of which one had its records in files and the other in memory."""
    in_files = ClientStore(memory_budget_mb=0, folder=tmp_path)
    in_files.put({c: record(c) for c in (0, 2, 4)}, 0)
    in_memory = ClientStore()
    in_memory.put({c: record(c) for c in (1, 3)}, 0)
    store = ClientStore(memory_budget_mb=2 * KB, folder=tmp_path)
    store.load_state_dict({**in_files.state_dict(), "records": in_memory.state_dict()["records"]})
    for client_id in (0, 2, 1, 4, 3, 1):
        assert store.memory(client_id)["x"][0] == client_id
    store.put({2: record(5)}, 1)
    assert store._bytes <= 2 * 1024
    assert [store.memory(c)["x"][0] for c in range(5)] == [0, 1, 5, 3, 4]
    assert store.state_dict()["records"] == {}


@pytest.mark.parametrize("call", ["validate", "test"])
def test_an_evaluation_elsewhere_finds_the_files_beside_its_checkpoint(tmp_path, call, monkeypatch):
    """A run of clients without shared weights is tested from its checkpoint, whose records lie in the run's folder."""
    keep = ModelCheckpoint(tmp_path / "run" / "checkpoints", save_last=True)
    settings = {"callbacks": [keep], "enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
    loop = FederatedLoop(Local(net=BatchNormNet, optimizer=sgd()), seed=5)
    trainer(2, **settings).fit(loop, datamodule=toy_data())
    assert list((tmp_path / "run" / "clients").glob("*.safetensors"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    fresh = FederatedLoop(Local(net=BatchNormNet, optimizer=sgd()), seed=5)
    evaluated = trainer(2, logger=True, default_root_dir=tmp_path / "elsewhere")
    (values,) = getattr(evaluated, call)(fresh, datamodule=toy_data(), ckpt_path=keep.last_model_path, verbose=False)
    assert values["local/alma"] == pytest.approx(loop.round_metrics["local/alma"], abs=1e-6)
    assert not list((tmp_path / "elsewhere").rglob("*.safetensors"))
