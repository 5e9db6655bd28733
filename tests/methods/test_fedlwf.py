"""FedLwF: the model of the change is the teacher on the classes met before."""

from fl_lightning.methods import FedLwF
from tests.methods.changing import run
from tests.toys import equal, weights_of


def test_the_old_model_is_the_one_received_at_the_change():
    held = weights_of(run(FedLwF, 2))
    loop = run(FedLwF, 4)
    for client in range(3):
        memory = loop.store.record(client)[0]
        for name, value in memory["old"].items():
            assert value.equal(held[f"client.{name}"]), name
        assert memory["met"].tolist() == [True, True, False]


def test_new_classes_are_those_that_the_client_has_not_met():
    assert not equal(weights_of(run(FedLwF, 4)), weights_of(run(FedLwF, 4, classes="new")))
    assert equal(weights_of(run(FedLwF, 2)), weights_of(run(FedLwF, 2, classes="new")))
