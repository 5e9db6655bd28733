"""The list of members: what a round, its undoing, a skipped client and a checkpoint go through."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.client.store import ClientStore
from fl_lightning.federation import run as federated_run
from fl_lightning.federation.members import ClientRecords
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from fl_lightning.types import Member, Members
from tests.hooks.toy import SCAFFOLD
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

VERBS = [name for name in vars(Member) if not name.startswith("_") and callable(vars(Member)[name])]


class Counts(Member):
    """A new feature: counts what each client has sent, and halves the update of client 1."""

    name = "counts"

    def __init__(self):
        self.sent = Counter()
        self.rows = []

    def incoming(self, result):
        self.sent[result.update.client_id] += 1
        return result

    def end(self, outcome, shared):
        self.rows.append((outcome.aborted, sorted(outcome.failed), dict(self.sent)))
        return {"train/sent": float(sum(self.sent.values()))}

    def mark(self):
        return Counter(self.sent)

    def undo(self, mark):
        self.sent = Counter(mark)

    def state_dict(self, mark=None):
        return dict(self.sent if mark is None else mark)

    def load_state_dict(self, state):
        self.sent = Counter(state)


@pytest.fixture
def with_counts(monkeypatch):
    """One member more, by one line where the list is made."""
    made = []
    members_of = federated_run.members_of

    def one_more(**parts):
        made.append(Counts())
        return Members([*members_of(**parts).all, made[-1]])

    monkeypatch.setattr(federated_run, "members_of", one_more)
    return made


class Fails(FedAvg):
    """Client 2 fails in round 1."""

    def reply(self, exchange, local):
        if (self.context.client_id, local.round_idx) == (2, 1):
            raise ValueError("no")
        return {}


def client(kind=FedAvg):
    return kind(net=BatchNormNet, optimizer=sgd())


def test_a_member_more_takes_part_and_changes_nothing_else(with_counts):
    plain = weights_of(fit(client(), 2))
    loop = fit(client(), 2)
    assert with_counts[-1].sent == Counter(dict.fromkeys(range(len(SIZES)), 2))
    assert loop.round_metrics["train/sent"] == 2 * len(SIZES)
    assert equal(weights_of(loop), plain)


def test_it_is_undone_with_a_round_that_fails(with_counts):
    with pytest.raises(ClientError):
        fit(client(Fails), 3)
    assert with_counts[-1].sent == Counter(dict.fromkeys(range(len(SIZES)), 1))


def test_it_does_not_see_a_client_that_is_skipped_also_where_the_round_is_run_again(with_counts):
    class Twice(Fails):
        exchanges = ("first", "train")

        def reply(self, exchange, local):
            return super().reply(exchange, local) if exchange == "train" else {}

    fit(client(Twice), 3, faults="skip")
    others = dict.fromkeys(set(range(len(SIZES))) - {2}, 6)
    assert with_counts[-1].sent == Counter(others | {2: 4})


def test_a_checkpoint_has_its_state_before_the_round_that_is_under_way(with_counts, tmp_path):
    class Saves(Callback):
        def on_client_end(self, trainer, loop, update):
            if loop.trainer.current_epoch == 1 and update.client_id == 3:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    loop = FederatedLoop(client(), seed=3)
    trainer(2, callbacks=[Saves()]).fit(loop, datamodule=toy_data())
    saved = torch.load(tmp_path / "inside.ckpt", weights_only=True)["federated"]
    assert saved["counts"] == dict.fromkeys(range(len(SIZES)), 1)
    again = fit(client(), 2, ckpt_path=tmp_path / "inside.ckpt")
    assert with_counts[-1].sent == Counter(dict.fromkeys(range(len(SIZES)), 2))
    assert equal(weights_of(again), weights_of(loop))


def used(**settings):
    """Names of the members that take part in the last round of a fit."""
    kind = settings.pop("kind", FedAvg)
    found = []
    loop = FederatedLoop(client(kind), seed=3, **settings)

    class Looks(Callback):
        def on_train_batch_end(self, *_):
            found[:] = [type(member).__name__ for member in loop._run.members.used]

    loop.client.net_factory = Perceptron
    trainer(1, callbacks=[Looks()]).fit(loop, datamodule=toy_data())
    return set(found)


def test_what_is_not_asked_for_takes_no_part():
    features = {"Traces", "Structure", "ExtraStates", "NonPersistentBuffers", "FrozenEntries", "ClientTransforms"}
    features |= {"Transmitted", "SkipRecord", "ServerTransforms", "PersonalEntries", "ClientEnds"}
    assert not used() & features
    assert used(faults="skip") & features == {"Traces", "SkipRecord"}
    assert used(personal="*head*") & features == {"PersonalEntries"}
    assert used(faults=FaultPolicy(min_clients=2)) & features == {"SkipRecord"}
    assert used(kind=SCAFFOLD) & features == {"Structure", "NonPersistentBuffers"}  # a class that is not the package's


def test_every_verb_does_nothing_by_default():
    member = Member()
    value = object()
    for verb in VERBS:
        given = {"outgoing": [value, 0], "incoming": [value], "on_client": [value], "aggregated": ["train", value]}
        rest = {"begin": [0, []], "end": [value, []], "enter": [value], "trained": [value], "take_checks": [None]}
        rest |= {"undo": [None], "entries_at": [None], "load_state_dict": [{}]}
        result = getattr(member, verb)(*{**given, **rest}.get(verb, []))
        assert result is value if verb in given else not result


def test_names_of_members_are_those_of_stored_checkpoints():
    """They are keys of the state of a checkpoint: another name loses the state of a run that is continued."""
    of_package = [kind for kind in all_kinds(Member) if kind.__module__.startswith("fl_lightning.")]
    names = {kind.name for kind in of_package if isinstance(kind.name, str) and kind.name}
    assert names == {
        "buffers",
        "client",
        "frozen",
        "initial_personal",
        "messages",
        "plateau",
        "recorder",
        "store",
        "tasks",
        "traffic",
        "transforms",
    }


def all_kinds(base):
    for kind in base.__subclasses__():
        yield kind
        yield from all_kinds(kind)


def records_of(store, *, rank, states):
    """The records of a rank of two, where `states` are those of all ranks."""
    communicator = SimpleNamespace(
        world=2,
        rank=rank,
        gather_to_root=lambda state: states if rank == 0 else [],
        assign_clients=lambda clients, cost, owners: {client_id: client_id % 2 for client_id in clients},
    )
    weights = SimpleNamespace(personal=())
    return ClientRecords(store=store, communicator=communicator, global_weights=weights, initial={}, cost=lambda _: 1)


def test_a_checkpoint_of_two_processes_holds_the_records_of_both():
    """In memory, as in a run without a folder; the records that lie in files are tested with those."""
    stores = [ClientStore(memory_budget_mb=None) for _ in range(2)]
    for rank, store in enumerate(stores):
        store.own({0: 0, 1: 1, 3: 1})
        store.put({client_id: ({"times": client_id}, None) for client_id in (0, 1, 3) if client_id % 2 == rank}, 0)
    states = [store.state_dict() for store in stores]
    state = records_of(stores[0], rank=0, states=states).state_dict()
    assert list(state["records"]) == [0, 1, 3]
    for rank, clients in enumerate(({0}, {1, 3})):
        loaded = ClientStore(memory_budget_mb=None)
        records_of(loaded, rank=rank, states=[]).load_state_dict(state)
        assert loaded.clients == clients
        assert {client_id: loaded.memory(client_id) for client_id in clients} == {c: {"times": c} for c in clients}
