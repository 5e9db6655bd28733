"""What is gone is refused, with what to set in its place."""

import pytest
import yaml

from fl_lightning import FederatedLoop
from fl_lightning.distributed import ClientParallelStrategy
from fl_lightning.methods import FedAvg
from fl_lightning.utils.renamed import GONE
from tests.commands import EXPERIMENT, refusal

GONE_OF_LOOP = GONE["FederatedLoop"]
STRATEGY = "fl_lightning.distributed.ClientParallelStrategy"
REMEDY = "leave it out: clients are spread by their samples and the operations of their nets"


@pytest.mark.parametrize("name", GONE_OF_LOOP)
def test_an_argument_is_refused_in_python(name):
    remedy = GONE_OF_LOOP[name].format("").split(" (")[0]
    with pytest.raises(TypeError, match=f"^FederatedLoop: the argument '{name}' is gone; {remedy}"):
        FederatedLoop(FedAvg(), **{name: None})


@pytest.mark.parametrize("name", GONE_OF_LOOP)
def test_an_option_is_refused_on_the_command_line(name):
    said = refusal(f"fit {EXPERIMENT} --model.{name} skip", 2)
    assert f"the option 'model.{name}' is gone; {GONE_OF_LOOP[name].format('model.')}" in said


@pytest.mark.parametrize("name", GONE_OF_LOOP)
def test_a_key_is_refused_in_a_file(name, tmp_path):
    (tmp_path / "old.yaml").write_text(f"model: {{{name}: skip}}\n")
    said = refusal(f"fit {EXPERIMENT} -c {tmp_path}/old.yaml", 2)
    assert f"the option 'model.{name}' is gone; {GONE_OF_LOOP[name].format('model.')}" in said


@pytest.mark.parametrize("value", [True, False])
def test_the_strategy_refuses_by_seconds_in_python(value):
    with pytest.raises(TypeError, match=f"^ClientParallelStrategy: the argument 'by_seconds' is gone; {REMEDY}$"):
        ClientParallelStrategy(by_seconds=value)

    class Own(ClientParallelStrategy):
        pass

    with pytest.raises(TypeError, match=r"^Own: the argument 'by_seconds' is gone"):
        Own(by_seconds=value)


def test_the_strategy_takes_the_arguments_of_lightnings():
    assert ClientParallelStrategy(find_unused_parameters=True, start_method="spawn").starts_all


def test_the_strategy_refuses_by_seconds_on_the_command_line():
    said = refusal(f"fit {EXPERIMENT} --trainer.strategy {STRATEGY} --trainer.strategy.by_seconds true", 2)
    assert f"trainer.strategy: the option 'by_seconds' is gone; {REMEDY}" in said


def test_the_strategy_refuses_by_seconds_in_a_file(tmp_path):
    strategy = {"class_path": STRATEGY, "init_args": {"by_seconds": True}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    said = refusal(f"fit {EXPERIMENT} -c {tmp_path}/old.yaml", 2)
    assert f"trainer.strategy: the option 'by_seconds' is gone; {REMEDY}" in said
