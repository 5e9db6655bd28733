"""What makes two runs one: more rounds and another place continue a run, anything that changes a number does not."""

from dataclasses import replace

import pytest

from fl_lightning.experiments.cell_files import located, prepare
from fl_lightning.experiments.cells import Cells, Request, started, with_fewer_rounds
from fl_lightning.experiments.experiment import Experiment, Runs
from fl_lightning.experiments.naming import cell_name
from fl_lightning.experiments.tuning import tried_of, untuned

BASE = ["experiment/digits_fedntd"]


def cell(settings=None, experiment=None, **request):
    """The only cell of an experiment with these settings."""
    whole = experiment or Experiment(BASE, [Runs(["FedNTD"], settings=settings or {})])
    (only,) = Cells(whole, Request(**request)).all()
    return only


@pytest.mark.parametrize(
    "settings",
    [
        {"trainer.max_epochs": 99},
        {"trainer.max_epochs": -1, "trainer.max_steps": 9},
        {"trainer.enable_progress_bar": False, "trainer.log_every_n_steps": 5},
        {"trainer.logger": True, "trainer.default_root_dir": "elsewhere"},
        {"data.source": {"class_path": "MNIST", "init_args": {"root": "elsewhere", "download": True}}},
    ],
    ids=str,
)
def test_where_and_how_long_a_run_runs_is_not_what_it_is(settings):
    source = {"data.source": {"class_path": "MNIST"}} if "data.source" in settings else {}
    assert cell(settings).name == cell(source).name


@pytest.mark.parametrize(
    "settings",
    [
        {"model.client.beta": 0.3},
        {"model.local_epochs": 1},
        {"data.partition.alpha": 0.2},
        {"trainer.precision": "bf16-mixed"},
        {"trainer.callbacks": [{"class_path": "fl_lightning.monitors.DriftMonitor"}]},
        {"model.evaluate_clients_every": 1},
        {"model.initial_weights": "weights.pt"},
        {"data.val_fraction": 0.2},
        {"data.seed": 3},
        {"best.monitor": "global/loss"},
        {"model.threads": 2},
        {"model.chunk": 3},
        {"trainer.devices": 2},
        {"data.eval_batch_size": 7},
    ],
    ids=str,
)
def test_a_setting_that_changes_a_value_or_what_is_on_record_is_another_run(settings):
    held = Experiment(BASE, [Runs(["FedNTD"], settings=settings)], hold=["partition", "cohorts", "training"])
    plain = Experiment(BASE, [Runs(["FedNTD"])], hold=["partition", "cohorts", "training"])
    assert cell(experiment=held).name != cell(experiment=plain).name


def test_a_seed_is_another_run_and_a_start_too():
    config = dict(cell().config)
    assert cell(seeds=[1]).name != cell().name
    assert cell_name("FedNTD", 0, config, "FedAvg-seed0-12345678") != cell_name("FedNTD", 0, config)


COSINE = {"model.lr_decay": "{cosine: 0.001}"}


def test_a_cosine_over_all_rounds_is_part_of_a_run_and_fewer_rounds_of_it_are_its_beginning():
    whole = cell(COSINE)
    other = cell({**COSINE, "trainer.max_epochs": 60})
    assert whole.name != other.name
    half = cell(COSINE, rounds=0.5)
    assert half.name == whole.name
    assert (whole.max_rounds, half.max_rounds) == (30, 15)
    assert half.config["model"]["lr_decay"]["rounds"] == 30
    asked = Request(settings=(("trainer.max_epochs", "9"),))
    rows = [Runs(["FedNTD"], settings=COSINE), Runs(["FedNTD"], label="without")]
    rounds = [(each.all_rounds, each.own_rounds) for each in Cells(Experiment(BASE, rows), asked).all()]
    assert rounds == [(9, 30), (30, 30)], "with a cosine more rounds are another run"


@pytest.mark.parametrize(("asked", "rounds"), [(20, 20), (0.25, 8), (0.1, 3), (0.01, 1)])
def test_rounds_are_a_number_or_a_share(asked, rounds):
    assert with_fewer_rounds(cell().config, asked)["trainer"]["max_epochs"] == rounds


def test_equal_runs_of_several_names_are_made_once_and_found_again(tmp_path):
    rows = [Runs(["FedNTD"], label="first"), Runs(["FedNTD"], label="second", settings={"model.client.beta": 1.0})]
    first, second = located(Cells(Experiment(BASE, rows), Request()).all(), tmp_path)
    assert (first.method, second.method) == ("first", "second")
    assert first.name == second.name
    older = replace(first, name="older-seed0-12345678")
    prepare(older, tmp_path)
    assert {each.name for each in located([first, second], tmp_path)} == {older.name}


def test_a_setting_of_a_case_is_left_out_where_a_method_does_not_know_it():
    experiment = Experiment(BASE, [Runs(["FedAvg", "FedNTD"])], {"": {"model.client.beta": 0.3}})
    first, second = Cells(experiment, Request()).all()
    assert "beta" not in first.config["model"]["client"]["init_args"]
    assert second.config["model"]["client"]["init_args"]["beta"] == 0.3


def test_a_setting_that_a_case_sets_is_not_tuned_there_and_a_sentence_says_so(tmp_path):
    runs = Runs(["FedNTD"], tune={"model.client.beta": [0.3, 1.0]})
    experiment = Experiment(BASE, [runs], {"free": {}, "set": {"model.client.beta": 0.5}})
    cells = Cells(experiment, Request())
    assert {place[1] for place in tried_of(cells, tmp_path)} == {"free"}
    assert untuned(cells) == ["Not tuned: set, FedNTD, over model.client.beta, which is set to 0.5."]


def test_what_is_below_a_class_that_the_case_names_is_known():
    case = {"data.partition": "ShardPartition", "data.partition.shards_per_client": 3}
    partition = cell(experiment=Experiment(BASE, [Runs(["FedAvg"])], {"s = 3": case})).config["data"]["partition"]
    assert partition["init_args"]["shards_per_client"] == 3


def test_files_of_a_case_lie_over_the_base_and_a_users_over_them():
    experiment = Experiment(BASE, [Runs(["FedAvg"])], {"": {"config": ["federation/cross_device"]}})
    assert cell(experiment=experiment).config["data"]["num_clients"] == 100
    assert cell(experiment=experiment, configs=["trainer/gpu"]).max_rounds == 30  # not 100
    asked = Request(["trainer/gpu"], (("trainer.max_epochs", "7"),))
    assert [each.max_rounds for each in Cells(experiment, asked).all()] == [7]
    users = cell(experiment=experiment, configs=["federation/cross_silo"])
    assert users.config["data"]["participation"] == 1.0


def test_files_that_are_asked_for_leave_a_case_its_data():
    other = Experiment(BASE, [Runs(["FedAvg"])], {"clothes": {"config": ["data/fashionmnist"]}})
    with pytest.raises(ValueError, match=r"puts \S+MNIST into 'clothes', whose own file has \S+FashionMNIST; leave"):
        Cells(other, Request(["data/mnist"]))


def test_a_start_keeps_its_rounds_and_they_belong_to_what_begins_with_it(tmp_path):
    names = []
    for rounds, asked in ((6, None), (6, 2), (4, None)):
        start = Runs(["FedAvg"], settings={"trainer.max_epochs": rounds})
        cells = Cells(Experiment(BASE, [Runs(["FedNTD"])], start=start), Request(rounds=asked))
        (begin,) = cells.starts()
        assert begin.max_rounds == rounds
        (tmp_path / "runs" / begin.name / "0").mkdir(parents=True, exist_ok=True)
        names += [each.name for each in started(cells.all(), [begin], tmp_path)]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize(
    ("rows", "cases", "sentence"),
    [
        (
            [Runs(["FedAvg"]), Runs(["FedNTD"], label="FedAvg")],
            {"": {}},
            "'FedAvg' stands twice in ''; give one a label",
        ),
        ([Runs(["FedAvg"])], {0.1: {}}, "the name of a case must be text, got 0.1; put it in quotes"),
    ],
    ids=["twice", "no text"],
)
def test_rows_and_columns_have_names_of_their_own(rows, cases, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        Experiment(BASE, rows, cases)


def test_folders_of_images_are_told_apart_by_their_files(tmp_path):
    def name(root):
        return cell({"data.source": {"class_path": "ImageFolder", "init_args": {"root": str(root)}}}).name

    for folder, text in (("first", "cat"), ("copied", "cat"), ("other", "a dog")):
        (tmp_path / folder / "train").mkdir(parents=True)
        (tmp_path / folder / "train/1.png").write_text(text)
    assert name(tmp_path / "first") == name(tmp_path / "copied") != name(tmp_path / "other")
    assert name(tmp_path / "missing") != name(tmp_path / "gone")


def test_a_share_of_rounds_needs_their_number():
    assert cell({"trainer.max_epochs": -1, "trainer.max_steps": 8}, rounds=0.5).max_rounds == 4
    with pytest.raises(ValueError, match=r"a share of trainer\.max_epochs or max_steps"):
        cell({"trainer.max_epochs": -1, "trainer.max_time": "00:00:10:00"}, rounds=0.5)
