"""One list of other words, and one rule for the nearest name, behind all suggestions."""

from collections import Counter

import pytest

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.utils.signatures import WHERE
from fl_lightning.utils.suggestions import MEANT, OTHER_WORDS, nearest, suggestion

NEAREST = [
    ("fedprox", ["FedAvg", "FedProx"], "FedProx"),
    ("bf16mixed", ["bf16-true", "bf16-mixed"], "bf16-mixed"),
    ("local_epoch", ["local_epochs", "max_epochs"], "local_epochs"),
    ("optim", ["server_optimizer_of_a_loop", "optimizer_of_a_client"], "optimizer_of_a_client"),
    ("optim", ["optimizer_of_a_client", "optimizer_of_a_server"], None),
    ("op", ["optimizer_of_a_client"], None),
    ("x", ["FedAvg"], None),
    ("", ["FedAvg"], None),
    ("FedAvg", [], None),
]

IN_PYTHON = [
    (FedAvg, "learning_rate", "it is the optimizer's: "),
    (FedAvg, "eta_g", "it is the server optimizer's: "),
    (FederatedLoop, "clip", "it is clip_norm, an argument of FederatedLoop"),
    (FederatedDataModule, "local_bs", "it is batch_size, an argument of FederatedDataModule"),
    (FederatedDataModule, "n_parties", "the clients are num_clients and participation of FederatedDataModule"),
    (FederatedDataModule, "dirichlet_alpha", "it is a partition's: "),
    (FederatedLoop, "global_epochs", "rounds are epochs of the Trainer: "),
    (FederatedLoop, "epochs", "passes over a client's data are local_epochs of FederatedLoop, rounds max_epochs of "),
    (FederatedLoop, "data", "the Trainer is given the data: "),
    (FederatedLoop, "datasets", "datasets are given by FederatedDataModule.from_datasets"),
    (FedAvg, "arch", "a client takes net= "),
    (FederatedLoop, "gpus", r"it is devices, an argument of the Trainer: Trainer\("),
    (FederatedLoop, "devices", r"it is an argument of the Trainer: Trainer\("),
    (FederatedLoop, "evaluate_clients_each", "the nearest is 'evaluate_clients_every'; it takes client, "),
    (FedAvg, "optim", "the nearest is 'optimizer'; it takes "),
    (FedAvg, "xyz", "it takes "),
]


@pytest.mark.parametrize(("name", "known", "expected"), NEAREST)
def test_the_nearest_name(name, known, expected):
    assert nearest(name, known) == expected
    assert suggestion(name, known) == (f"; the nearest is {expected!r}" if expected else "")


@pytest.mark.parametrize(("kind", "name", "says"), IN_PYTHON)
def test_an_argument_in_other_words_is_told_its_place(kind, name, says):
    with pytest.raises(TypeError, match=rf"^{kind.__name__} got an unexpected keyword argument '{name}'; {says}"):
        kind(**{name: 1})


def test_a_word_stands_for_one_option():
    words = Counter(word for listed in OTHER_WORDS.values() for word in listed.split())
    assert [word for word, count in words.items() if count > 1] == []
    assert set(words) == set(MEANT)


def test_the_places_of_python_use_the_one_list():
    options = [setting for settings in WHERE.values() for setting in settings if "." in setting]
    assert set(options) <= set(OTHER_WORDS)
    assert len(options) == len(set(options))
