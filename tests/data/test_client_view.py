"""One client's view of its data: what a method's `receive`, `phases` and `reply` are handed."""

import pytest
import torch

from fl_lightning.data import TensorSource
from fl_lightning.types import ClientData
from fl_lightning.utils.keyed import keyed_generator
from tests.toys import samples, toy_data

ALL = torch.arange(23)


def ready(sizes=(7, 23), **settings):
    data = toy_data(sizes, **settings)
    data.setup("fit")
    data.key_batches(3)
    return data


def draw(generator):
    return torch.rand(4, generator=generator).tolist()


def test_a_view_knows_the_federation_that_it_belongs_to():
    view: ClientData = ready(batch_size="full").view(1, 4)
    assert (view.client_id, view.round_idx, view.num_clients, view.batch_size) == (1, 4, 2, "full")
    assert ready(batch_size=6).view(0, 0).batch_size == 6


@pytest.mark.parametrize(("given", "own", "wanted"), [(None, 5, 5), (4, 5, 4), ("full", 5, 23), (None, "full", 23)])
def test_samples_per_batch_are_those_given_or_the_data_modules(given, own, wanted):
    view = ready(batch_size=own).view(1, 0)
    assert view.samples_per_batch("train", given) == wanted


def test_a_generator_depends_on_seed_purpose_client_and_if_asked_on_the_round():
    data = ready()
    first = data.view(1, 0)
    later = data.view(1, 5)
    other = data.view(0, 0)
    assert draw(first.generator("a")) == draw(first.generator("a")) == draw(keyed_generator(3, "a", 0, 1))
    assert draw(first.generator("a")) != draw(later.generator("a"))
    lasting = draw(first.generator("a", per_round=False))
    assert lasting == draw(later.generator("a", per_round=False)) == draw(keyed_generator(3, "a", client_id=1))
    assert lasting not in [draw(other.generator("a", per_round=False)), draw(first.generator("b", per_round=False))]
    assert lasting != draw(first.generator("a"))
    data.key_batches(4)
    assert lasting != draw(data.view(1, 0).generator("a", per_round=False))


class TestRestricted:
    def test_only_the_named_samples_are_left_in_their_order(self):
        view = ready().view(1, 0)
        part = view.restricted("train", torch.tensor([20, 3, 11]))
        (x, y), (own, labels) = view.all(), part.all()
        assert torch.equal(own, x[[20, 3, 11]])
        assert torch.equal(labels, y[[20, 3, 11]])
        assert torch.equal(part.label_counts, labels.bincount(minlength=3))
        assert (part.size(), part.samples_per_batch("train", "full")) == (3, 3)
        assert (part.client_id, part.round_idx, part.num_clients, part.batch_size) == (1, 0, 2, 5)
        assert (view.size(), view.label_counts.sum()) == (23, 23)

    def test_positions_count_the_samples_that_are_left(self):
        view = ready().view(1, 2)
        part = view.restricted("train", torch.arange(22, 8, -1))
        x, _ = part.all()
        seen = []
        for (batch, _), positions in part.batches(epoch=1, batch_size=4, with_index=True):
            assert torch.equal(batch, x[positions])
            seen += positions.tolist()
        assert sorted(seen) == list(range(14))
        wanted = torch.randperm(14, generator=keyed_generator(3, "batches/train/1", 2, 1))
        assert seen == wanted.tolist()

    def test_all_positions_are_the_client_itself(self):
        view = ready().view(1, 0)
        for ours, theirs in zip(view.batches(epoch=2), view.restricted("train", ALL).batches(epoch=2), strict=True):
            assert all(map(torch.equal, ours, theirs))
        assert draw(view.generator("a")) == draw(view.restricted("train", ALL[:2]).generator("a"))

    def test_a_part_of_a_part(self):
        view = ready().view(1, 0)
        part = view.restricted("train", ALL[10:]).restricted("train", torch.tensor([0, 5]))
        assert torch.equal(part.all()[0], view.all()[0][[10, 15]])

    def test_the_other_splits_stay(self):
        public = TensorSource(samples(9, seed=5), samples(1))
        view = ready(extra_splits={"public": public}).view(1, 0)
        part = view.restricted("public", torch.tensor([4]))
        assert (part.size("public"), view.size("public")) == (1, 9)
        assert torch.equal(part.all("public")[0], public.train[0][[4]])
        assert torch.equal(part.all()[0], view.all()[0])
        assert (part.size("test"), part.label_counts.sum()) == (view.size("test"), 23)

    def test_nobody_is_left(self):
        part = ready().view(1, 0).restricted("train", torch.arange(0))
        assert (part.size(), part.label_counts.tolist(), list(part.batches(epoch=0))) == (0, [0, 0, 0], [])

    def test_augmented_batches_draw_from_the_same_key(self):
        def noisy(x, generator):
            return x if generator is None else x + torch.rand(x.shape, generator=generator)

        data = ready()
        data.split("train").transform = noisy
        data.split("train").augments = True
        part = data.view(1, 0).restricted("train", ALL[:6])
        (x, _), (drawn, _) = part.all(), next(part.batches(epoch=0, shuffle=False, batch_size=6))
        assert torch.equal(drawn, x + torch.rand(x.shape, generator=keyed_generator(3, "augment/train/0", 0, 1)))

    @pytest.mark.parametrize(
        ("positions", "got"),
        [
            (torch.tensor([0, 23]), r"0 \.\.\. 23"),
            (torch.tensor([-1]), r"-1 \.\.\. -1"),
            (torch.ones(23, dtype=torch.bool), "torch.bool"),
            (torch.tensor([0.5]), "torch.float32"),
        ],
    )
    def test_positions_that_are_none_are_refused(self, positions, got):
        with pytest.raises(ValueError, match=rf"positions must be int64 in \[0, 23\).*, got {got}"):
            ready().view(1, 0).restricted("train", positions)

    def test_the_servers_splits_stay_out_of_sight(self):
        with pytest.raises(ValueError, match="no client sees the server's split 'val'"):
            ready(val_fraction=0.1, partition=None).view(0, 0).restricted("val", torch.arange(1))
