"""What is gone is refused, with what to set in its place."""

import pytest

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.utils.renamed import GONE
from tests.commands import EXPERIMENT, refusal


@pytest.mark.parametrize("name", GONE)
def test_an_argument_is_refused_in_python(name):
    remedy = GONE[name].format("").split(" (")[0]
    with pytest.raises(TypeError, match=f"^FederatedLoop: the argument '{name}' is gone; {remedy}"):
        FederatedLoop(FedAvg(), **{name: None})


@pytest.mark.parametrize("name", GONE)
def test_an_option_is_refused_on_the_command_line(name):
    said = refusal(f"fit {EXPERIMENT} --model.{name} skip", 2)
    assert f"the option 'model.{name}' is gone; {GONE[name].format('model.')}" in said


@pytest.mark.parametrize("name", GONE)
def test_a_key_is_refused_in_a_file(name, tmp_path):
    (tmp_path / "old.yaml").write_text(f"model: {{{name}: skip}}\n")
    said = refusal(f"fit {EXPERIMENT} -c {tmp_path}/old.yaml", 2)
    assert f"the option 'model.{name}' is gone; {GONE[name].format('model.')}" in said
