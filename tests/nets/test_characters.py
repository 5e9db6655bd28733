"""Nets of text: their shapes, and a federation of Shakespeare's roles end to end."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import Shakespeare
from fl_lightning.methods import FedAvg
from fl_lightning.nets import CharLSTM, CharTransformer
from tests.data.test_more_sources import leaf
from tests.toys import equal, fit, sgd, weights_of

SMALL = {
    "lstm": partial(CharLSTM, hidden=8),
    "transformer": partial(CharTransformer, width=8, heads=2, layers=1),
}
PLAY = "Who's there? Nay, answer me: stand, and unfold yourself. Long live the king! Bernardo? He."


def test_the_defaults_have_leafs_size():
    assert sum(p.numel() for p in CharLSTM(80, (80,)).parameters()) == 819_920


@pytest.mark.parametrize("build", SMALL.values(), ids=SMALL)
def test_the_last_place_sees_all_and_the_order_counts(build):
    net = build(5, (6,), vocabulary=9)
    x = torch.arange(6)[None]
    assert net.features(x).shape == (1, net.head.in_features)
    for changed in (x.flip(1), torch.tensor([[8, 1, 2, 3, 4, 5]])):
        assert not torch.allclose(net(x), net(changed))


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: CharLSTM(5, (1, 6)), r"CharLSTM needs sequences of numbers: an input_shape \(length,\), got \(1, 6\)"),
        (lambda: CharTransformer(5, (6,), width=6), "must be a multiple of its heads, got 6 and 4"),
    ],
)
def test_what_is_no_sequence_is_refused(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


@pytest.mark.parametrize("name", SMALL)
def test_roles_are_trained_one_by_one_or_at_once(tmp_path, name):
    texts = {role: [PLAY[i : i + 8] for i in range(start, start + 20)] for start, role in enumerate("ABC")}
    play = {role: {"x": x, "y": [part[0] for part in x]} for role, x in texts.items()}
    root = str(leaf(tmp_path, {"train": play, "test": play}))
    trained = {}
    for chunk in (1, "auto"):
        data = FederatedDataModule(Shakespeare(root), num_clients=None, by="role", batch_size=8)
        client = FedAvg(net=SMALL[name], optimizer=sgd(0.5, momentum=0.0))
        loop = fit(client, 2, data, chunk=chunk)
        trained[chunk] = weights_of(loop)
        assert 0 <= loop.recorder.history.curve("global/acc")[1] <= 1
    if name == "lstm":
        assert equal(*trained.values())
    for entry, value in trained[1].items():
        torch.testing.assert_close(trained["auto"][entry], value, atol=1e-5, rtol=1e-4)
