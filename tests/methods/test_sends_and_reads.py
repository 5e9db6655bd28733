"""What a method's clients send and read of their data is what its class declares."""

from typing import get_args

import pytest

from fl_lightning.data.clients import ClientView
from fl_lightning.federation.members import PersonalEntries
from fl_lightning.methods import SCAFFOLD
from fl_lightning.types import Read, Sent
from tests.toys import BatchNormNet, fit, sgd
from tools.measure_methods import declared, entries
from tools.measurement_runs import measurement_run
from tools.quiet import silent

KINDS = {  # of what is sent, by its name in the messages
    "weights": "weights",
    "head": "weights",
    "control_change": "control",
    "u": "importance",
    "v": "importance",
    "h": "statistics",
    "helpfulness": "statistics",
    "cluster": "statistics",
    "rows": "statistics",
    "prototypes": "prototypes",
    "counts": "label counts",
    "knowledge": "logits",
    "means": "statistics",
    "covariances": "statistics",
}
FEDPAC = {"v": "statistics"}  # the variance of its features; FedCurv's is a sum of Fisher information
ENTRIES = [entry for entry in entries() if declared(entry)["sends"] is not None]


@pytest.fixture
def watched(monkeypatch):
    """Kinds of what is read of training data, and whether means of personal entries were taken."""
    seen = set()

    def notes(kind, wants=lambda *args, **settings: True):
        def around(function):
            def noting(self, split="train", *args, **settings):
                if split == "train" and wants(*args, **settings):
                    seen.add(kind)
                return function(self, split, *args, **settings)

            return noting

        return around

    def whole(epoch=None, *args, **settings):
        return epoch is None  # a training step's batches are of an epoch

    counts = ClientView.label_counts.fget
    added = PersonalEntries.incoming
    monkeypatch.setattr(ClientView, "label_counts", property(lambda view: seen.add("label counts") or counts(view)))
    for name, kind, wants in ("all", "samples", None), ("labels", "labels", None), ("batches", "batches", whole):
        wrap = notes(kind) if wants is None else notes(kind, wants)
        monkeypatch.setattr(ClientView, name, wrap(getattr(ClientView, name)))

    def incoming(member, result):
        if result.personal is not None:
            seen.add("personal means")
        return added(member, result)

    monkeypatch.setattr(PersonalEntries, "incoming", incoming)
    return seen


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry.name for entry in ENTRIES])
def test_a_method_sends_and_reads_what_it_declares(entry, watched):
    with silent():
        contents = measurement_run(entry.federation).up_contents
    kinds = {**KINDS, **(FEDPAC if entry.name == "FedPAC" else {})}
    sent = {kinds[name] for name in contents} | watched & {"personal means"}
    assert declared(entry) == {"sends": sorted(sent), "reads": sorted(watched - {"personal means"})}
    assert sent <= {*get_args(Sent)}
    assert watched - {"personal means"} <= {*get_args(Read)}


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reads_its_data_for_option_i_only(option, watched):
    client = SCAFFOLD(option=option, net=BatchNormNet, optimizer=sgd())
    fit(client, 1)
    assert client.reads == watched - {"personal means"}
