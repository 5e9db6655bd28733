"""A small federation whose clients have two classes first, and then the third one."""

from functools import partial

from fl_lightning.data import ClassIncremental
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, fit, sgd, toy_data

Small = partial(Perceptron, hidden=(6,))
SIZES = (12, 17, 9)


def changing(rounds_per_task=2, **settings):
    return toy_data(SIZES, scenario=ClassIncremental([[0, 1], [2]], rounds_per_task), **settings)


def run(kind, rounds=4, data=None, net=BatchNormNet, **settings):
    client = kind(net=net, optimizer=sgd(), **settings)
    return fit(client, rounds, changing() if data is None else data)
