"""What an unknown option stands for does not depend on the order of the options."""

import pytest

from fl_lightning.cli.meant_options import OF_FIT, candidates


@pytest.mark.parametrize("options", [OF_FIT, OF_FIT[::-1]])
def test_of_options_with_the_same_last_part_the_clients_comes_first(options):
    found = candidates("lr", options)
    assert found[:2] == ["model.client.optimizer.lr", "model.server_optimizer.lr"]
