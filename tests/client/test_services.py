"""Services of a client: the weight of logged values."""

import pytest
import torch

from fl_lightning.client.services import ClientServices, MetricAccumulator, reduced


def test_a_value_weighs_the_samples_of_its_batch_and_outside_a_batch_the_given_number():
    services = ClientServices()
    logged = MetricAccumulator()
    services.begin(logged=logged)
    services.log("before the first epoch", 1.0)
    services.begin(num_samples=7)
    services.log("at the begin of an epoch", 1.0)
    services.begin(batch=(torch.zeros(3, 2), torch.zeros(3)))
    services.log("in a batch", 1.0)
    services.log("in the same batch", 1.0)
    services.log("with its own weight", 1.0, batch_size=5)
    services.begin(batch={"x": torch.zeros(4, 2)})
    services.begin(num_samples=2)
    services.log("after a batch without values", 1.0)
    weights = [weight for _, pairs in logged.rows.values() for _, weight in pairs]
    assert weights == [1, 7, 3, 3, 5, 2]


def test_values_of_the_next_client_go_to_its_own_accumulator_with_weight_one():
    services = ClientServices()
    first = MetricAccumulator()
    second = MetricAccumulator()
    services.begin(logged=first, num_samples=9)
    services.begin(logged=second)
    services.log("a", 2.0)
    services.begin(logged=first, num_samples=9)
    services.log("b", 3.0)
    assert second.rows == {"a": ("mean", [(2.0, 1)])}
    assert first.rows == {"b": ("mean", [(3.0, 9)])}


@pytest.mark.parametrize("kind", ["mean", "sum", "max", "min"])
def test_many_values_are_reduced_on_the_way_to_the_same_value(kind):
    values = [3.0, -1.0, 4.0, 1.5, -9.25, 2.0, 6.0, 5.0, 3.5, 8.0]
    some = MetricAccumulator(most_rows=3)
    all_of_them = MetricAccumulator(most_rows=None)
    for weight, value in enumerate(values, 1):
        some.log("value", torch.tensor(value), weight, reduce_fx=kind)
        all_of_them.log("value", value, weight, reduce_fx=kind)
    assert len(some.rows["value"][1]) < 3
    assert len(all_of_them.rows["value"][1]) == len(values)
    assert reduced([some.rows]) == pytest.approx(reduced([all_of_them.rows]), rel=1e-12)
