"""A parser may be used again: the tests make the options of a command once, and a user's script may too."""

from fl_lightning.cli.parser_only import BuiltError, ParserOnly
from tests.commands import EXPERIMENT, TINY, refusal, say

USES = (
    f"fit {EXPERIMENT} --model.client FedProx --model.client.mu 0.5 --trainer.max_epochs 3 --print_config",
    f"fit {TINY} --model.personal [a] --data.partition ShardPartition --trainer.callbacks EarlyStopping --print_config",
)


class Anew(ParserOnly):
    """With options of its own, which the tests' fixture leaves alone."""

    def add_arguments_to_parser(self, parser):
        super().add_arguments_to_parser(parser)


def new_parser():
    try:
        Anew(["fit"])
    except BuiltError as built:
        return built.args[0]


def test_a_used_parser_reads_what_a_new_one_does():
    for line in USES:
        assert say(line).code == 0
    refusal(f"fit {EXPERIMENT} --model.client.betta 1", 2)
    words = ["fit", *EXPERIMENT.split(), "--model.client.temperature", "2"]
    try:
        ParserOnly(["fit"])
    except BuiltError as built:
        used = built.args[0]
    new = new_parser()
    assert used is not new
    assert used.parse_args(words).as_dict() == new.parse_args(words).as_dict()
    assert used.get_defaults().as_dict() == new.get_defaults().as_dict()
