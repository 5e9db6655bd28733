"""The benchmark runs and compares equals; what it measures is not tested."""

import csv
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from bench import (
    clock,
    commands,
    costs,
    federated,
    floor,
    gpu,
    kernels,
    parallel,
    parts,
    profile,
    scale,
    stays,
    ways,
    whole,
)
from bench.__main__ import COLUMNS, main, parse, print_parts, with_threads
from bench.blocks import quartiles, run_block, turns
from bench.methods import METHODS, seconds_per_client
from bench.monitors import MONITORS, seconds
from bench.workloads import WORKLOADS
from tests.user_modules import Plain


def test_quick_run_writes_the_table(tmp_path, capsys):
    main(["--quick", "--workload", "tiny"], results=tmp_path)  # fails where an accuracy is not the floor's
    with (tmp_path / "speed.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["variant"] for row in rows] == ["floor", "train", "train-cohort", "all", "all-cohort", "empty"]
    assert all(float(row["s_per_round"]) > 0 for row in rows)
    assert "tiny" in capsys.readouterr().out


def test_a_partial_run_keeps_the_other_rows(tmp_path):
    main(["--quick", "--workload", "tiny", "--variant", "empty"], results=tmp_path)
    main(["--quick", "--workload", "tiny", "--variant", "train"], results=tmp_path)
    with (tmp_path / "speed.csv").open(newline="", encoding="utf-8") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == ["floor", "empty", "train"]


@pytest.mark.parametrize("name", METHODS)
def test_the_step_of_every_method_is_timed(name):
    work = replace(WORKLOADS["tiny"], cohort_size=2, rounds=1)
    assert seconds_per_client(name, work) > 0


def test_the_round_of_a_method_is_timed_and_what_it_sends_is_counted():
    work = replace(WORKLOADS["tiny"], **costs.SIZES["tiny"] | {"rounds": 3, "unmeasured": 1})
    fedavg, scaffold = (next(e for e in costs.entries() if e.name == name) for name in ("FedAvg", "SCAFFOLD"))
    with costs.silent():
        one, more = (costs.cost(entry, work) for entry in (fedavg, scaffold))
    assert len(one.seconds) == 2
    assert min(one.seconds) > 0
    assert one.down == one.up == 10 * 4 * 4810 / costs.MB
    assert (more.down, more.up) == (2 * one.down, 2 * one.up)


def test_a_row_of_costs_has_the_ratios_round_by_round():
    base = costs.Cost([1.0, 2.0, 1.0], 1, 1, 1)
    own = costs.Cost([2.0, 2.0, 4.0], 3, 1, 5)
    assert costs.row("SCAFFOLD", [(base, own)]) == ("SCAFFOLD", 2.0, 2.0, 1.5, 3.0, 3, 1, 5)
    assert costs.row("SCAFFOLD", [(base, own), (own, own)])[1:5] == (2.0, 1.0, 1.0, 1.75)


def test_the_memory_of_a_stateful_method_is_read_over_its_rounds():
    rows = costs.stateful(num_clients=100, rounds=4, budget_mb=0)
    assert [row[0] for row in rows] == ["100, 1", "100, 2", "100, 3", "100, 4"]
    assert all(mb > 0 and records > 0 for _, mb, records in rows)


@pytest.mark.parametrize(
    "name",
    [
        "ForgettingMonitor",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("ClasswiseReport", "LossLandscape")),
    ],
)
def test_the_cost_of_a_monitor_is_timed(name):
    assert name in MONITORS
    own, rest = seconds(name, "tiny")
    assert own > 0
    assert rest > 0


@pytest.mark.parametrize(("name", "batches"), [("tiny", 1), ("cnn", 2)])
def test_an_empty_round_has_as_many_evaluation_batches_as_a_federation(name, batches):
    work = WORKLOADS[name]
    _, (inputs, _) = work.samples()
    data = federated.clients_data(work)
    data.setup("fit")
    assert len(federated.Batches(inputs).val_dataloader()) == len(list(data.val_dataloader())) == batches


def test_columns_of_parts_are_below_their_variants(capsys):
    of_part = {"evaluation": 0.5, "guard": 0.0}
    print_parts("tiny", with_threads({"train-cohort": of_part, "all": of_part, "rank 0 of 2": of_part}, 2))
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split() for line in lines] == [["evaluation", "0.50", "0.50"], ["all", "0.50", "0.50"]]
    ends = [head.index(name) + len(name) for name in ("train-cohort, 2 threads", "  all, 2 threads")]
    assert all([line[end - 4 : end] for end in ends] == ["0.50", "0.50"] for line in lines)


def test_turns_end_with_the_time_and_give_one_at_least():
    assert list(turns(3, seconds=60)) == [0, 1, 2]
    assert list(turns(3, seconds=0)) == [0]


def test_quartiles_of_a_single_value_are_that_value():
    assert quartiles([2.0]) == (2.0, 2.0, 2.0)
    assert quartiles([1.0, 2.0, 3.0]) == (1.5, 2.0, 2.5)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (k > 0)) for k, name in enumerate(scale.METHODS)]
)
def test_rounds_of_many_clients_are_measured(method):
    start, seconds_per_round, mb, checkpoint_mb = scale.run(20, method, rounds=scale.UNMEASURED + 2)
    assert min(start, seconds_per_round, checkpoint_mb) > 0
    assert mb < 500


def test_a_trace_has_the_functions_of_a_round(tmp_path, capfd):
    path = tmp_path / "profile.json"
    profile.main(["--output", str(path)])
    said = capfd.readouterr().out
    assert "federation/loop.py" in said
    first = profile.functions(path)[0]
    assert first.function.endswith("training_step")
    assert first.calls == profile.TRACED


def test_the_parts_of_a_round_are_told_by_the_calls_under_way():
    """The net within an evaluation is part of that; what no file names is no part."""
    assert parts.part_of("/x/torch/nn/modules/linear.py", "forward") == "forward passes and loss"
    assert parts.part_of("/x/fl_lightning/engines/training.py", "_epoch") == "package: all else"
    assert parts.part_of("/x/bench/floor.py", "copy_into") == "weights loaded, kept, summed"
    assert parts.part_of("/x/bench/floor.py", "floor") is None
    work = replace(WORKLOADS["tiny"], rounds=40)
    found = {variant: parts.one_block(work, variant) for variant in ("floor", "train")}
    expected = {"evaluation", "forward passes and loss", "backward passes", "optimizer"}
    for variant, more in {"floor": set(), "train": {"package: all else", "Lightning: all else"}}.items():
        assert {part for part, ms in found[variant].items() if ms} >= expected | more
    assert not [part for part, ms in found["floor"].items() if ms and ("package" in part or "Lightning" in part)]


@pytest.mark.slow
def test_two_processes_tell_their_seconds_and_parts(monkeypatch):
    monkeypatch.setitem(parallel.ROUNDS, "cnn", 2)
    monkeypatch.setitem(parallel.ROUNDS, "unlike", 2)
    assert all(of["backward passes"] > 0 and of[parts.OTHERS] > 0 for of in parallel.parts_of_ranks("cnn"))
    for spread in (parallel.BY_SAMPLES, parallel.BY_COST):
        assert len(parallel.seconds_of_rounds("unlike", parallel.Way(2, 1, spread))) == 1


def test_both_ways_of_a_kernel_are_measured(monkeypatch):
    monkeypatch.setattr(kernels, "NETS", {name: kernels.NETS[name] for name in ("KnFuM1, 32", "FedKATCNN, 32")})
    rows = list(kernels.measure(repeats=1, seconds=0))
    assert [row[0] for row in rows[:3]] == [
        "step channels last: KnFuM1, 32",
        "step channels last: FedKATCNN, 32",
        "evaluation channels last: FedKATCNN, 125",
    ]
    assert len(rows) == 3 + len(kernels.LAYERS) + len(kernels.OPTIMIZERS) * len(kernels.SIZES)
    assert all(min(row[1:]) > 0 for row in rows)


@pytest.mark.slow
def test_whole_commands_are_measured_and_reports_have_their_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "GROUPS", 3)
    monkeypatch.setattr(commands, "METHODS", ("FedAvg", "FedProx"))
    rows = {what: values for what, *values in commands.measure(repeats=1, seconds=0)}
    assert list(rows) == list(commands.commands())
    assert all(cpu > 1 and wall > 1 for cpu, wall, _ in rows.values())
    assert rows["report, 3 groups of 30"][2] > rows["report, 1 run of 30"][2] > 0


@pytest.mark.parametrize("method", ["FedRep", "Ditto"])
def test_clients_of_the_floor_keep_what_the_packages_keep(method):
    """The accuracy of the global model says nothing of that."""
    work = replace(WORKLOADS["tiny"], method=method, cohort_size=1, rounds=1, local_epochs=3)
    ((client_id,),) = work.cohorts(1)
    loop, data = federated.federation(work)
    federated.fit(loop, data, 1, limit_val_batches=0, **federated.BARE)
    memory, personal = loop.store.record(client_id)
    own = memory["own_models"][-1] if method == "Ditto" else personal
    net = work.first_net()
    places = work.owned(client_id)
    samples = tuple(of[places.start : places.stop] for of in work.samples()[0])
    first = floor.copied(net)
    kept = floor.CLIENTS[method](net, work=work, own=samples, start=first, kept=first)
    torch.testing.assert_close(kept, list(own.values()), rtol=1e-4, atol=1e-6)


class Small(Plain):
    def training_step(self, batch, batch_idx):
        return self.net(batch[0].flatten(1)[:, :4]).square().mean()


@pytest.mark.parametrize("federated", [True, False])
def test_a_step_of_a_short_stay_is_timed(federated):
    assert stays.seconds(1, Small(), federated=federated, batch=2, side=2) > 0


@pytest.mark.parametrize("schedule", list(clock.SCHEDULES))
def test_early_and_late_rounds_of_a_schedule_are_timed(schedule):
    scheduler, interval = clock.SCHEDULES[schedule]
    early, late = clock.seconds(scheduler, interval, rounds=4)
    assert early > 0
    assert late > 0


def test_the_variants_for_a_gpu_train_the_same_on_a_cpu(tmp_path):
    gpu.main(["--device", "cpu", "--size", "small", "--clients", "2", "--output", str(tmp_path / "gpu.csv")])
    with (tmp_path / "gpu.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == gpu.COLUMNS
    plain = ["bare", "package", "stacked", "package-stacked"]
    assert [row["variant"] for row in found] == plain * len(gpu.PRECISIONS)
    assert all(float(row["s_per_step"]) > 0 for row in found)


def test_a_stacked_step_is_that_of_the_bare_loop():
    case = ways.Case(replace(ways.SIZES["small"], cohort_size=3), torch.device("cpu"), "fp32")
    step = ways.StackedStep(case)
    batches = list(case.batches())
    for x, y in batches:
        step(x, y)
    net = case.work.first_net()
    sgd = torch.optim.SGD(net.parameters(), case.work.lr, case.work.momentum, weight_decay=case.work.weight_decay)
    for x, y in batches:
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(net(x[1]), y[1]).backward()
        sgd.step()
    own = [value[1] for value in step.params.values()]
    torch.testing.assert_close(own, [value.detach() for value in net.parameters()])


@pytest.mark.parametrize("part", whole.SHARES)
def test_the_arguments_of_every_part_are_taken(part):
    arguments, seconds = whole.SHARES[part]
    assert parse([*arguments, "--seconds", str(seconds)]).seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (["--workload", "unlike"], "tiny, cnn, resnet, text, personal, ditto, adam"),
        (["--parallel", "--workload", "tiny"], "cnn, resnet, unlike"),
        (["--parallel", "--quick", "--workload", "unlike"], "cnn, resnet"),
        (["--parts", "--parallel", "--workload", "unlike"], "cnn, resnet"),
        (["--costs", "--workload", "resnet"], "tiny, cnn"),
    ],
)
def test_workloads_that_something_asked_for_cannot_run_are_refused(arguments, known, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"--workload must be one of {known} here, got {arguments[-1]}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_ends_in_its_time_and_says_what_was_not_done(capfd):
    begin = time.monotonic()
    hangs = ("--workload", "tiny", "--rounds", "1000000")
    parts = {"fails": (("--rounds", "x"), 1.0), "hangs": (hangs, 2.0), "help": (("--help",), 1.0)}
    rest = "rows that are missing above stay as they were"
    undone = [f"fails: failed with exit status 2; {rest}", f"hangs: not done within 20 s; {rest}"]
    assert whole.run_all(seconds=80, longest=20, parts=parts) == undone
    assert time.monotonic() - begin < 80
    said = capfd.readouterr().out.splitlines()
    assert said[-2:] == undone
    assert said[-3].startswith("all parts: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", list(gpu.PRECISIONS))
def test_a_graph_takes_the_steps_that_it_was_made_of(precision):
    case = ways.Case(replace(ways.SIZES["small"], cohort_size=3), torch.device("cuda"), precision)
    plain = ways.StackedStep(case)
    graphed = ways.StackedStep(case)
    batches = list(case.batches())
    graph = ways.Graph(graphed, *batches[0])
    plain.begin()
    graphed.begin()
    for x, y in batches:
        plain(x, y)
        graph(x, y)
    torch.testing.assert_close(graphed.params, plain.params)


@pytest.mark.parametrize(
    "name", ["adam", *(pytest.param(each, marks=pytest.mark.slow) for each in ("resnet", "text", "personal", "ditto"))]
)
def test_package_and_floor_reach_the_same_model(name):
    """Sums in float32 and in float64 may bring two of the samples over the border."""
    work = replace(WORKLOADS[name], cohort_size=2, rounds=2, unmeasured=1)
    hits = [round(250 * run_block(work, variant).accuracy) for variant in ("floor", "train")]
    assert abs(hits[0] - hits[1]) <= 2


@pytest.mark.skipif(bool(find_spec("fedlab") or find_spec("fluke")), reason="one of them is installed")
def test_peers_that_are_missing_are_named():
    with pytest.raises(SystemExit, match=r"--peers needs FedLab and fluke; install fedlab==1\.3\.0"):
        main(["--peers"])
