"""Nothing that comes in is trusted: every fault is named, or its client is skipped, as the policy says."""

import pytest
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from flwr.app import Array, Error, Message
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassRecall

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.federation import identity
from fl_lightning.flower import node
from fl_lightning.flower.wire import from_records, part_of, to_records
from fl_lightning.members.faults import FaultError
from fl_lightning.methods import SCAFFOLD, FedAvg, FedNovaAggregator
from tests.flower.grid import federate
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

CLIENT = 1
NODE = 101
ROUND = 1
ENTRY = "net.body.0.weight"


def loop(policy, kind=FedAvg, lr=0.1):
    return FederatedLoop(kind(net=BatchNormNet, optimizer=sgd(lr)), seed=3, faults=policy)


def data():
    return toy_data((7, 12, 5))


def in_round(change, ask="train", round_idx=ROUND, node_id=NODE):
    """Change what one client answers in one round, as parts of the message."""

    def changed(answers):
        def answer(message):
            reply = answers[node_id](message)
            asked = from_records(message.content, torch.device("cpu"))["head"]
            if (asked["ask"], asked.get("round_idx")) != (ask, round_idx):
                return reply
            return change(message, from_records(reply.content, torch.device("cpu")))

        return {**answers, node_id: answer}

    return changed


def edited(**parts):
    """Change parts of an answer."""

    def change(message, content):
        for name, edit in parts.items():
            edit(content[name])
        return Message(to_records({name: part_of(part) for name, part in content.items()}), reply_to=message)

    return change


def of(**parts):
    return in_round(edited(**parts))


def setting(name, value):
    return lambda part: part.__setitem__(name, value)


def filled(value):
    return lambda weights: weights[ENTRY].fill_(value)


def garbage(message, content):
    return Message(to_records({"head": Array("x", (3,), "x", b"\x00\x01\x02")}), reply_to=message)


FAULTS = {
    "nan": (of(weights=filled(float("nan"))), "NaN or infinite"),
    "inf": (of(weights=filled(float("inf"))), "NaN or infinite"),
    "shape": (of(weights=setting(ENTRY, torch.zeros(1))), "must have shape"),
    "missing": (of(weights=lambda weights: weights.pop(ENTRY)), "is missing"),
    "extra": (of(weights=setting("more", torch.zeros(1))), "has 'more' too"),
    "dtype": (of(weights=setting(ENTRY, torch.zeros(8, 4, dtype=torch.float64))), "of type torch.float32"),
    "no tensor": (of(weights=setting(ENTRY, "text")), "must be a tensor"),
    "garbage": (in_round(garbage), "cannot be read"),
    "no head": (in_round(lambda message, content: Message(to_records({}), reply_to=message)), "cannot be read"),
    "n = 10^15": (of(head=setting("num_samples", 10**15)), r"\[0, 12\]"),
    "n = -5": (of(head=setting("num_samples", -5)), r"num_samples of a result must be a whole number in \[0, 12\]"),
    "n = 2.5": (of(head=setting("num_samples", 2.5)), "whole number"),
    "of another client": (of(head=setting("client_id", 0)), "answer for that client"),
    "more idle steps than steps": (of(head=setting("idle_steps", 10**6)), "idle_steps of a result must be"),
    "an infinite rate": (of(head=setting("accumulated_lr", float("inf"))), "accumulated_lr of a result must be finite"),
    "no rate": (of(head=setting("lr", 0.0)), "lr of a result must be > 0"),
    "a file elsewhere": (of(head=setting("file", "../../secret")), "as it names its files"),
    "a file of another client": (
        of(head=setting("file", "client_0_round_1_0123456789ab.safetensors")),
        "must be named client_1_round_1_",
    ),
    "a name of a column": (of(head=setting("logged", {"epoch": ("mean", [(1.0, 1.0)])})), "names of its own"),
    "a name without end": (of(head=setting("logged", {"x" * 501: ("mean", [(1.0, 1.0)])})), "names of its own"),
    "a weight without end": (
        of(head=setting("logged", {"loss": ("mean", [(1.0, float("inf"))])})),
        "numbers of finite weight",
    ),
    "a key of the server's": (of(head=setting("logged", {"global/acc": ("mean", [(1.0, 1.0)])})), "names of its own"),
    "logged text": (of(head=setting("logged", {"loss": ("mean", [("high", 1.0)])})), "as numbers"),
    "says why": (of(head=setting("error", "disk full")), "disk full"),
    "Flower's error": (in_round(lambda message, content: Message(Error(8, "crashed"), reply_to=message)), "crashed"),
    "no answer": (in_round(lambda message, content: None), "no answer within"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_run(name, tmp_path):
    change, words = FAULTS[name]
    with pytest.raises(
        (FaultError, ValueError, TypeError), match=rf"(?s)client {CLIENT}.*{words}|{words}.*client {CLIENT}"
    ) as raised:
        federate(lambda: loop("error"), data, tmp_path, change, timeout=0.3)
    assert f"round {ROUND}" in str(raised.value)


@pytest.fixture(scope="module")
def one_round_and_two_without_it():
    """Weights of the simulation, the second round without the client."""
    one = fit(None, 1, toy_data((7, 12, 5), schedule=[[0, 1, 2]]), loop=loop("skip"))
    return weights_of(one), weights_of(
        fit(None, 2, toy_data((7, 12, 5), schedule=[[0, 1, 2], [0, 2]]), loop=loop("skip"))
    )


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_its_client_out(name, tmp_path, one_round_and_two_without_it):
    change, _ = FAULTS[name]
    server, *_ = federate(lambda: loop("skip"), data, tmp_path, change, timeout=0.3)
    (fault,) = server.skipped
    assert (fault.round_idx, fault.client_id) == (ROUND, CLIENT)
    one, two = one_round_and_two_without_it
    assert equal(weights_of(server), two)
    assert not equal(weights_of(server), one)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_client_that_raises(policy, tmp_path):
    class Raises(FedAvg):
        def reply(self, exchange, local):
            if (self.context.client_id, local.round_idx) == (CLIENT, ROUND):
                raise RuntimeError("no power")
            return {}

    if policy == "error":
        with pytest.raises(FaultError, match=rf"client {CLIENT} at node {NODE} failed in round {ROUND}.*no power"):
            federate(lambda: loop(policy, Raises), data, tmp_path)
    else:
        server, *_ = federate(lambda: loop(policy, Raises), data, tmp_path)
        assert [(f.client_id, "no power" in f.reason) for f in server.skipped] == [(CLIENT, True)]


EXTRAS = {
    "shape": lambda extras: extras["control_change"].__setitem__(ENTRY, torch.zeros(())),
    "missing": lambda extras: extras.pop("control_change"),
    "another kind": setting("control_change", 3.0),
    "more": setting("more", torch.zeros(1)),
    "nan": lambda extras: extras["control_change"][ENTRY].fill_(float("nan")),
}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", EXTRAS)
def test_what_a_method_sends_besides_the_weights(name, policy, tmp_path):
    change = of(extras=EXTRAS[name])
    if policy == "error":
        with pytest.raises((FaultError, ValueError), match=f"client {CLIENT}"):
            federate(lambda: loop(policy, SCAFFOLD), data, tmp_path, change)
    else:
        server, *_ = federate(lambda: loop(policy, SCAFFOLD), data, tmp_path, change)
        assert [fault.client_id for fault in server.skipped] == [CLIENT]


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("client_id", [0, 2])
def test_no_single_client_decides_what_the_others_may_send(client_id, policy, tmp_path):
    """Not even in the first round, whoever answers first."""
    change = in_round(edited(extras=EXTRAS["more"]), round_idx=0, node_id=100 + client_id)
    if policy == "error":
        with pytest.raises(
            FaultError, match=f"client {client_id} at .* in round 0: 'more' of an answer must be absent"
        ):
            federate(lambda: loop(policy, SCAFFOLD), data, tmp_path, change)
    else:
        server, *_ = federate(lambda: loop(policy, SCAFFOLD), data, tmp_path, change, rounds=1)
        assert [fault.client_id for fault in server.skipped] == [client_id]


def test_a_rate_that_the_rule_needs_must_be_a_number(tmp_path):
    def nova():
        return FederatedLoop(
            FedAvg(net=BatchNormNet, optimizer=sgd()), aggregator=FedNovaAggregator(), seed=3, faults="error"
        )

    with pytest.raises(FaultError, match=f"client {CLIENT} .*accumulated_lr of a result must be finite"):
        federate(nova, data, tmp_path, of(head=setting("accumulated_lr", float("nan"))))


def test_fewer_clients_than_are_needed_leave_the_model(tmp_path):
    policy = FaultPolicy(on_error="skip", min_clients=3)
    server, *_ = federate(lambda: loop(policy), data, tmp_path, FAULTS["says why"][0])
    assert equal(weights_of(server), weights_of(fit(None, 1, data(), loop=loop(policy))))


class Counts(FedAvg):
    """Logs a metric object in training."""

    def build(self, num_classes, input_shape):
        super().build(num_classes, input_shape)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/mean", self.mean(loss) and self.mean)
        return loss


def state_of(name, value):
    return lambda counted: counted[0]["states"][0].__setitem__(name, value)


COUNTED = {
    "another type": (state_of("mean_value", torch.zeros((), dtype=torch.float64)), "as that of the module here"),
    "another shape": (state_of("mean_value", torch.zeros(10**6)), "as that of the module here"),
    "another name": (state_of("more", torch.zeros(())), "as that of the module here"),
    "samples": (state_of("mean_value", [torch.zeros(())]), "as that of the module here"),
    "text": (state_of("mean_value", "high"), "as that of the module here"),
    "more states": (lambda counted: counted[0]["states"].append({}), "as that of the module here"),
    "no such object": (lambda counted: counted[0].update(path="net"), "must be one of the module here, got net"),
    "a path that is none": (lambda counted: counted[0].update(path=3), "must be one of the module here, got 3"),
    "a name of the server": (lambda counted: counted[0].update(name="global/acc"), "names of its own, got global/acc"),
}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", COUNTED)
def test_what_a_client_has_counted_in_a_metric_object_is_checked(name, policy, tmp_path):
    edit, words = COUNTED[name]

    def counting():
        return FederatedLoop(Counts(net=BatchNormNet, optimizer=sgd()), seed=3, faults=policy)

    if policy == "error":
        with pytest.raises(FaultError, match=rf"client {CLIENT} at node {NODE} failed in round {ROUND}: .*{words}"):
            federate(counting, data, tmp_path, of(counted=edit))
    else:
        server, *_ = federate(counting, data, tmp_path, of(counted=edit))
        assert [fault.client_id for fault in server.skipped] == [CLIENT]
        assert server.round_metrics["train/mean"] > 0


SCORES = {
    "more right answers than samples": (setting("correct", 10.0**6), "must count answers"),
    "half an answer": (setting("correct", 0.5), "must count answers"),
    "inf": (setting("metrics", {"recall": torch.tensor(float("inf"))}), "must be finite"),
    "another shape": (setting("metrics", {"recall": torch.zeros(1000)}), "shape"),
    "another name": (setting("metrics", {"more": torch.tensor(0.5)}), "'recall' of an answer must be"),
    "text": (setting("metrics", {"recall": "high"}), "tensors by name"),
}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_is_none(name, policy, tmp_path):
    edit, words = SCORES[name]

    def scored():
        made = loop(policy)
        metrics = {"recall": MulticlassRecall(num_classes=3)}
        kinds = {"seed": 3, "faults": policy, "metrics": metrics, "evaluate_clients_every": 1}
        return FederatedLoop(made.client, **kinds)

    change = in_round(edited(head=edit), "evaluate")
    if policy == "error":
        with pytest.raises(FaultError, match=rf"client {CLIENT} at node {NODE} failed in round {ROUND}: .*{words}"):
            federate(scored, data, tmp_path, change)
    else:
        server, *_ = federate(scored, data, tmp_path, change)
        assert 0 <= server.round_metrics["local/recall"] <= 1


@pytest.mark.parametrize(
    "sizes", [None, {}, {"train": 3}, {"train": -1, "test": 2}, {"train": 2**41, "test": 2}, "many"]
)
def test_a_node_that_registers_no_numbers_of_samples(sizes, tmp_path):
    change = in_round(edited(head=setting("sizes", sizes)), "hello", None)
    with pytest.raises(
        FaultError, match=rf"node {NODE} may not take part.*numbers of samples must lie in \[0, 2\^40\]"
    ):
        federate(lambda: loop("error"), data, tmp_path, change)


def replaced(make_node):
    """Put another node in the place of the client's."""
    return lambda answers: {**answers, NODE: make_node().answer}


def test_two_nodes_with_one_client(tmp_path):
    def two(answers):
        return {**answers, 200: node.Node(loop("error"), data(), CLIENT, tmp_path / "other", max_epochs=2).answer}

    with pytest.raises(FaultError, match=r"client 1 belongs to node \d+"):
        federate(lambda: loop("error"), data, tmp_path, two)
    server, _, nodes = federate(lambda: loop("skip"), data, tmp_path, two)
    assert len(nodes.refused) == 1
    assert equal(weights_of(server), weights_of(fit(None, 2, data(), loop=loop("skip"))))


def test_other_settings(tmp_path):
    def other(policy):
        return replaced(lambda: node.Node(loop(policy, lr=0.2), data(), CLIENT, tmp_path / "other", max_epochs=2))

    with pytest.raises(FaultError, match=f"node {NODE} may not take part.*these differ: model.client.optimizer.lr"):
        federate(lambda: loop("error"), data, tmp_path, other("error"))
    server, _, nodes = federate(lambda: loop("skip"), data, tmp_path, other("skip"))
    assert nodes.refused.keys() == {NODE}
    assert [fault.reason for fault in server.skipped] == ["no node has registered it"]


def test_another_version(tmp_path, monkeypatch):
    def other(answers):
        with monkeypatch.context() as patch:
            patch.setattr(identity, "version", lambda name: "0.0.1")
            old = node.Node(loop("error"), data(), CLIENT, tmp_path / "other", max_epochs=2)
        return {**answers, NODE: old.answer}

    with pytest.raises(FaultError, match=r"these differ: version.fl_lightning, version.torch"):
        federate(lambda: loop("error"), data, tmp_path, other)
    server, _, nodes = federate(lambda: loop("skip"), data, tmp_path, other)
    assert nodes.refused.keys() == {NODE}
    assert [fault.client_id for fault in server.skipped] == [CLIENT]


def test_a_message_for_other_settings_is_refused_by_the_node(tmp_path):
    """A node that was started anew with another YAML in the middle of a run."""
    restarted = []

    def change(answers):
        def answer(message):
            asked = from_records(message.content, torch.device("cpu"))["head"]
            if asked.get("round_idx") == ROUND and not restarted:
                restarted.append(node.Node(loop("error", lr=0.2), data(), CLIENT, tmp_path / "1", max_epochs=2))
            return restarted[0].answer(message) if restarted else answers[NODE](message)

        return {**answers, NODE: answer}

    with pytest.raises(FaultError, match="settings of a message must be"):
        federate(lambda: loop("error"), data, tmp_path, change)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_client_without_a_score(policy, tmp_path):
    def change(answers):
        def answer(message):
            asked = from_records(message.content, torch.device("cpu"))["head"]
            lost = asked["ask"] == "evaluate" and asked["round_idx"] == ROUND
            return Message(Error(5, "gone"), reply_to=message) if lost else answers[NODE](message)

        return {**answers, NODE: answer}

    def own():
        return FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, faults=policy, evaluate_clients_every=1)

    if policy == "error":
        with pytest.raises(FaultError, match=rf"client {CLIENT} at node {NODE} failed in round {ROUND}.*gone"):
            federate(own, data, tmp_path, change)
    else:
        server, *_ = federate(own, data, tmp_path, change)
        assert 0 <= server.round_metrics["local/alma"] <= 1
