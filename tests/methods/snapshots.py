"""Checks methods whose server replaces the models that it keeps, so that no snapshot copies them."""

import pytest

from fl_lightning import FederatedLoop
from tests.toys import equal, fit, toy_data


def check_failed_round(make, server_class, **data):
    """Assert that a round copies no tensor of the server's, and that a round that fails puts all of them back.

    Args:
        make: Makes the client, anew at each call.
        server_class: Class of the server module.
        data: Settings of the toy data, of at least two rounds.
    """

    class Fails(server_class):
        def finish(self, exchange, aggregate):
            taken = self.snapshot()
            for name, value in self.state_dict().items():
                if value.numel():
                    assert taken[name].data_ptr() == value.data_ptr()
            found = super().finish(exchange, aggregate)
            if self.server.round_idx == 1:
                raise ZeroDivisionError
            return found

    loop = FederatedLoop(make(), server_module=Fails(), seed=3)
    with pytest.raises(ZeroDivisionError):
        fit(None, 2, toy_data(**data), loop=loop)
    after = fit(make(), 1, toy_data(**data))
    assert equal(dict(loop.server_module.state_dict()), dict(after.server_module.state_dict()))
