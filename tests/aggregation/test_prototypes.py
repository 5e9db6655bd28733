"""The prototypes that a server module keeps: a weighted mean for each class, kept in rounds without the class."""

import pytest
import torch
from torch import nn

from fl_lightning.aggregation import PrototypeServer


def server(classes: int = 3, width: int = 2):
    made = PrototypeServer()
    made.allocate_prototypes(nn.Linear(width, classes))
    return made


def renew(made, *clients):
    for means, weights, *included in clients:
        made.sum_prototypes(torch.tensor(means), torch.tensor(weights), *included)
    made.renew_prototypes()
    made.end_exchange()


def test_each_class_has_the_weighted_mean_over_the_clients_that_have_it():
    made = server()
    renew(
        made,
        ([[1.0, 2.0], [4.0, 4.0], [0.0, 0.0]], [1, 2, 0]),
        ([[5.0, 2.0], [0.0, 0.0], [0.0, 0.0]], [3, 0, 0]),
    )
    assert made.prototypes.dtype == torch.float64
    assert made.prototypes.tolist() == [[4.0, 2.0], [4.0, 4.0], [0.0, 0.0]]
    assert made.seen.tolist() == [True, True, False]


def test_weights_below_1_divide_as_well():
    made = server()
    renew(made, ([[6.0, 6.0]] * 3, [0.25, 0.5, 1.0]))
    assert made.prototypes.tolist() == [[6.0, 6.0]] * 3


def test_a_class_that_nobody_has_keeps_its_prototype():
    made = server()
    renew(made, ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], [1, 1, 1]))
    renew(made, ([[9.0, 9.0], [0.0, 0.0], [0.0, 0.0]], [1, 0, 0]))
    assert made.prototypes.tolist() == [[9.0, 9.0], [2.0, 2.0], [3.0, 3.0]]
    assert made.seen.all()


@pytest.mark.parametrize("included", [False, torch.tensor(False)])
def test_a_client_that_is_left_out_counts_nowhere(included):
    made = server()
    renew(made, ([[9.0, 9.0]] * 3, [5, 5, 5], included), ([[1.0, 1.0]] * 3, [1, 0, 0]))
    assert made.prototypes.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert made.seen.tolist() == [True, False, False]


def test_an_exchange_without_clients_changes_nothing():
    made = server()
    renew(made, ([[1.0, 1.0]] * 3, [1, 1, 0]))
    before = {name: value.clone() for name, value in made.state_dict().items()}
    renew(made)
    assert all(torch.equal(before[name], value) for name, value in made.state_dict().items())
