"""Command lines that people mistype: each ends in one sentence that says what is right."""

import re

import pytest

from tests.commands import say

RUN = "fit -c experiment/digits_fedavg --trainer.max_epochs 1"
MISTAKES = [
    ("fti -c experiment/digits_fedavg", "the command must be fit or validate .* got fti; the nearest is 'fit'"),
    ("help", "the command must be fit or validate .* got help"),
    ("--verison", "unknown option 'verison'; the nearest is 'version'; fl-lightning --help lists all"),
    ("fit -c", "error: -c needs a value, got none; write -c VALUE"),
    ("fit -c experiment/digits_fedav", "there is no file experiment/digits_fedav, .* is experiment/digits_fedavg;"),
    ("fit -c digits_fedavg", "there is no file digits_fedavg, .* the nearest is experiment/digits_fedavg;"),
    (f"{RUN} --trainer.max_epochs", "--trainer.max_epochs needs a value, got none; write --trainer.max_epochs VALUE"),
    (f"{RUN} --trainer.max_epochs ten", "trainer.max_epochs must be int, got ten; write a whole number, such as 3"),
    (f"{RUN} --trainer.precision 16x", "trainer.precision must be .* got 16x"),
    (f"{RUN} --trainer.logger wandb", "trainer.logger: there is no class 'wandb'; the nearest is 'WandbLogger'"),
    (f"{RUN} --trainer.strategy ddpp", "invalid strategy name: `strategy='ddpp'`"),
    (f"{RUN} --data.num_clients 0", "num_clients must be at least 1, got 0"),
    (f"{RUN} --data.num_clients 1e6", "data.num_clients must be int, got 1e6; write a whole number, such as 3"),
    (f"{RUN} --data.participation 2", r"participation must lie in \(0, 1\], got 2.0; 1 means all clients"),
    (f"{RUN} --data.partition.alpha -1", "alpha must be positive, got -1.0: 0.1 gives each client few classes"),
    (f"{RUN} --data.val_fraction 1", r"val_fraction must lie in \[0, 1\), got 1.0; 0 holds nothing back"),
    (f"{RUN} --data.batch_size huge", "data.batch_size must be int or full, got huge"),
    (f"{RUN} --data.alpha 0.1", "unknown option 'data.alpha'; the nearest is 'data.partition.alpha'"),
    (f"{RUN} --data Digits", "data must be the name of a file, got Digits; a class is given by --data.source NAME"),
    (
        f"{RUN} --model FedProx",
        "model must be the name of a file, got FedProx; a class is given by --model.client NAME",
    ),
    (f"{RUN} --model.mu 0.1", "unknown option 'model.mu'; the nearest is 'model.client.mu'"),
    (f"{RUN} --model.client.lr 0.1", "unknown option 'lr'; the nearest is 'model.client.optimizer.lr'"),
    (
        f"{RUN} --lr 0.1",
        "unknown option 'lr'; the nearest is 'model.client.optimizer.lr'; .* fit --help all lists them",
    ),
    (f"{RUN} --rounds 3", "unknown option 'rounds'; the nearest is 'trainer.max_epochs'"),
    (f"{RUN} --clients 3", "unknown option 'clients'; the nearest is 'data.num_clients'"),
    (f"{RUN} --seed 3", "unknown option 'seed'; the nearest is 'seed_everything'"),
    (f"{RUN} --client FedProx", "unknown option 'client'; the nearest is 'model.client'"),
    (f"{RUN} test", "unexpected argument 'test'; options begin with --"),
    (
        f"{RUN} --ckpt_path nosuch",
        "--ckpt_path must be last, best or a checkpoint file, got nosuch, which does not exist",
    ),
    ("validate", "validate needs trained weights, .* there is no run in runs/fit with a checkpoint: fit first"),
    ("predict --ckpt_path x.ckpt", "--ckpt_path must be last, best or a checkpoint file, got x.ckpt"),
    ("compare --methods FedAvg", "needs config, which has no default; write --config VALUE"),
    ("compare -c experiment/digits_fedavg --methods FedAvgg --output o", "'FedAvgg'; the nearest is 'FedAvg'"),
    (
        "compare -c experiment/digits_fedavg --methods FedAvg FedAvg --output o",
        "--methods must have names of their own, got FedAvg twice; write NAME=FedAvg",
    ),
    ("report nosuch", "a run folder holds metrics.csv, and there is none in nosuch or below"),
    ("reproduce nosuch/1", "an experiment is one that fl-lightning reproduce lists, or a file, got 'nosuch/1'"),
    ("configs nosuch", "there is no file nosuch, .* fl-lightning configs lists all names"),
    ("new method 3bad", "the name of a class has letters, digits and _, and begins with a letter, got '3bad'"),
    ("check", "check needs checkpoints, and there is none in what was named; name files, or folders"),
    ("methods --output xml", "output must be md or csv or json, got xml"),
    (f"{RUN} --model.client FedProx --model.client.mu", "error: --model.client.mu needs a value, got none; write"),
    (f"{RUN} --model.client.optimizer.lr --trainer.devices 1", "error: --model.client.optimizer.lr needs a value, got"),
    (f"{RUN} --model.client=", "model.client must be the name of a class, got nothing; it takes APFL, .* the import"),
    (f"{RUN} --data.num_clients=", "data.num_clients must be int, got nothing; write a whole number, such as 3"),
    (
        f"{RUN} --data.feature_shift 0.1",
        r"must have its settings by name \(noise, rotation, colour\), got 0.1; write --data.feature_shift.noise VALUE",
    ),
    (
        f"{RUN} --data.devices 0.1",
        r"must have its settings by name \(step_seconds, .*, file\), got 0.1; write --data.devices.step_seconds VALUE",
    ),
    (f"{RUN} --model.pacing Fedbuf", "model.pacing: there is no class 'Fedbuf'; the nearest is 'FedBuff'"),
    (
        f"{RUN} --data '{{a: '",
        "data must be YAML, and cannot be read at line 2, column 1 .*; close brackets and quotes",
    ),
    (f"{RUN} --model.client '{{class_path: FedProx'", "model.client must be YAML, and cannot be read at line 1"),
    (f"{RUN} --trainer.precision bf16mixed", "trainer.precision must be .*got bf16mixed; the nearest is 'bf16-mixed'"),
    (f"{RUN} --trainer.devices 0", "trainer.devices must be at least 1, got 0; auto takes all that there are"),
    (f"{RUN} --model.transforms NormClip", "needs max_norm, which has no default; write --model.transforms.max_norm"),
    (f"{RUN} --model.client.net.hidden 64", r"net.hidden must be Sequence, got 64; write a list, such as \[64\]"),
    (f"{RUN} -model.local_epochs 2", "'-model.local_epochs'; options begin with two hyphens: --model.local_epochs"),
    ("fit experiment/digits_fedavg", "unexpected argument .*; a file is given by -c experiment/digits_fedavg"),
    ("partition -c experiment/digits_fedavg --output", "--output needs a value, got none; write --output DIR"),
    ("fit -c 'data: {num_clients: 3'", "-c must be YAML, and cannot be read at line 2, column 1 .did not find expect"),
]


def test_they_are_forty_and_more():
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize(("line", "sentence"), MISTAKES, ids=[line.replace(RUN, "…") for line, _ in MISTAKES])
def test_a_mistyped_line_ends_in_one_sentence(line, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = say(line)
    assert said.code in (1, 2)
    *before, last = said.err.strip().splitlines()
    assert not [line for line in before if "Error" in line or "Traceback" in line]
    assert last.startswith("fl-lightning: error: ")
    assert re.search(sentence, last), last
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
