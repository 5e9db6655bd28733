"""Whatever lies in a run's folder: a sentence for that run and the page for the others, and nothing is waited for."""

import os
import shlex

import pytest
import torch

from fl_lightning.reports.saved import read_run
from tests.commands import refusal, say
from tests.reports.saved_runs import settings, write_run

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
TEXTS = {
    "empty": b"",
    "text": b"no table, and nothing else",
    "lines": b"one\ntwo\nthree\n",
    "pairs": b"round,client,loss_before,loss_after,acc_own_before,acc_own\n0,0,1e308,-1e308,inf,nan\n0,1,1e308,0,0,0\n",
    "header": b"round,client,a,b\n",
    "ragged": b"round,client,a\n0\n1,2,3,4,5\n",
    "words": b"round,client,a,b\nx,y,z,w\n",
    "not finite": b"round,client,a,b,global/acc,global/acc_class/0\n0,0,nan,inf,inf,inf\n1,1,-inf,inf,-inf,nan\n",
    "huge": b"round,client,a,global/acc,comm/bytes_up,comm/bytes_down\n0,0,1e308,1e308,1e308,1e308\n"
    b"1,1,-1e308,-1e308,1e308,1e308\n",
    "tiny": b"round,client,a,global/acc\n0,0,5e-324,5e-324\n1,0,0,0\n",
    "classes": b"round,global/acc_class/a,global/acc_class/b\n0,1e308,-1e308\n1,nan,nan\n5,inf,1e300\n",
    "rounds": b"round,client,a\n99999999999999999999999999,1,1\n",
    "below 0": b"round,client,a,b\n-1,-1,-1,-1\n",
    "far": b"round,client,a,b\n0,0,1,1\n9007199254740000,9007199254740000,9007199254740000,9007199254740000\n",
    "twice": b"round,round,a,a\n0,0,1,2\n",
    "no names": b",,,\n0,0,1,2\n",
    "unnamed": b"round,client,,\n0,0,1,2\n",
    "digits": b"round,client,a\n0,0," + b"9" * 5000 + b"\n" + b"9" * 5000 + b",0,1\n",
    "field": b"round,client,a\n0,0,1\n0,0," + b"x" * 200_000 + b"\n",
    "key": b"round,client," + b"x" * 100_000 + b"\n0,0,1\n",
    "quote": b'round,client,"a\n0,0,1\n',
    "NUL": b"round,client,a\x00b\n0,0,1\n\x00",
    "escapes": b"round,client,\x1b[2Ja,\xe2\x80\xaeb\n0,0,1,2\n",
    "binary": bytes(range(256)) * 8,
    "UTF-16": "round,client,a\n0,0,1\n".encode("utf-16"),
    "latin": "round,client,é\n0,0,1\n".encode("latin-1"),
    "mark": "\ufeffround,client,a\n0,0,1\n".encode(),
    "null": b"null",
    "number": b"3",
    "list": b"[1, 2]",
    "nested": b'{"a": {"b": [1]}}',
    "strings": b'{"a": "x", "model": "y"}',
    "big": b'{"a": 1' + b"0" * 400 + b', "b": Infinity, "test/acc": NaN, "test/acc_best": 1e308}',
    "surrogate": b'{"a\\ud800": 1, "model": {"tag": "\\ud800"}, "test/acc": 0.5}',
    "deep": b"[" * 100_000,
    "deep map": b'{"a":' * 100_000,
    "laughs": LAUGHS.encode(),
    "own alias": b"a: &a {b: *a}\nc: &c [*c, {d: *a}]\n",
    "merged": b"a0: &a0 {k: 1}\n"
    + b"".join(b"a%d: &a%d {<<: [%s]}\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 12)),
    "seeds": b"seed_everything: [1]\nmodel: {seed: [1, 2]}\n",
    "keys": b"1: 2\nnull: 3\n2001-01-01: 4\ntrue: 5\nmodel: {1: 2, class_path: [3], client: {class_path: {}}}\n",
    "tuple": b"[1, 2]: 6\n",
    "tag": b"!!python/object/apply:os.system ['false']\n",
    "wrong tags": b"a: !!int x\n",
    "wrong date": b"a: 2001-99-99\n",
    "kinds": b"a: !!set {x, y}\nb: !!binary aGk=\nc: 2001-01-01\nd: .inf\nmodel: {lr_decay: {cosine: x, rounds: {}}}\n",
    "unknown": b"a: !new {x: 1}\n",
    "unknown alias": b"a: *none\n",
    "tab": b"a:\n\t- b\n",
    "several": b"a: 1\n---\nb: 2\n",
}
NAMES = ["metrics.csv", "config.yaml", "test.json", "partition.csv", "clients.csv"]


def pipe(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def dangling(path):
    path.symlink_to("nowhere")


def loop(path):
    path.symlink_to(path.name)


def endless(path):
    path.symlink_to("/dev/zero")


WRONG = [pipe, folder, dangling, loop, endless]


def begin(folder, number=1):
    return write_run(folder / str(number), [0.2, 0.6], settings("FedNTD", 0), partition=[[1, 2, 3]])


def outcome(run):
    """The sentence with which a run is refused; empty where it can be read."""
    said = ""
    try:
        read_run(run)
    except (ValueError, OSError) as error:
        said = str(error)
    assert said.isprintable()
    return said


def check_report(root, wrong):
    """Each of these runs has one sentence, and the page has the others."""
    said = say(f"report {root} --output {root}/out")
    lines = said.err.splitlines()
    assert said.code == bool(wrong)
    starts = {f"fl-lightning: error: {run} is left out: " for run in wrong}
    assert {line.partition(" is left out: ")[0] + " is left out: " for line in lines} == starts
    page = (root / "out/report.html").read_text("utf-8")
    assert page.count(" is left out: ") == len(lines) == len(wrong)
    assert all(letter.isprintable() or letter == "\n" for letter in said.err + said.out + page.replace("\u00a0", " "))
    return page


READ = {
    "test.json": set(),
    "config.yaml": {"nested", "strings", "big", "surrogate", "kinds", "keys", "seeds"},
    "partition.csv": {"empty", "header", "text", "tiny", "NUL", "escapes"},
}
"""Contents that a file may have; of the others it must be refused. Tables of metrics and clients may have many."""

REFUSED = {
    "metrics.csv": {"empty", "text", "lines", "header", "words", "rounds", "below 0", "no names", "digits", "mark"}
}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_any_content(tmp_path, name):
    """It is read, or refused by one sentence that names it; the page has the runs that are read."""
    found = {}
    for text, content in TEXTS.items():
        run = begin(tmp_path, text.replace(" ", "_"))
        (run / name).write_bytes(content)
        found[text] = outcome(run)
        assert not found[text] or str(run / name) in found[text]
    wrong = {text for text, sentence in found.items() if sentence}
    assert wrong >= REFUSED.get(name, {"binary", "UTF-16", "latin"})
    assert not wrong & READ.get(name, set())
    if name in ("test.json", "config.yaml"):
        assert wrong == TEXTS.keys() - READ[name]
    begin(tmp_path)
    check_report(tmp_path, [tmp_path / text.replace(" ", "_") for text in wrong])


WILD = [("metrics.csv", text) for text in ("not finite", "huge", "tiny", "classes", "far", "key", "escapes", "pairs")]
WILD += [("partition.csv", "key"), ("clients.csv", "pairs")]
WILD += [
    pytest.param(name, text, marks=pytest.mark.slow)  # the tables before have such numbers and names
    for name, text in (("partition.csv", "tiny"), ("partition.csv", "escapes"), ("clients.csv", "key"))
]


@pytest.mark.filterwarnings("ignore:constrained_layout not applied", "ignore:Glyph", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "text"), WILD)
def test_wild_numbers_and_names_are_drawn(tmp_path, name, text):
    (begin(tmp_path) / name).write_bytes(TEXTS[text])
    assert "<img" in check_report(tmp_path, [])


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("make", WRONG)
def test_a_file_that_is_none_is_never_opened(tmp_path, make):
    for name in (*NAMES, "checkpoints/a.ckpt", "checkpoints"):
        run = begin(tmp_path, f"of_{name.replace('/', '_')}")
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        make(run / name)
        assert bool(outcome(run)) == (name == "metrics.csv")
    begin(tmp_path)
    check_report(tmp_path, [tmp_path / "of_metrics.csv"])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
@pytest.mark.usefixtures("without_pictures")
def test_a_file_that_may_not_be_read(tmp_path):
    for name in NAMES:
        run = begin(tmp_path, f"of_{name}")
        (run / name).touch()
        (run / name).chmod(0)
    begin(tmp_path)
    check_report(tmp_path, [tmp_path / f"of_{name}" for name in NAMES])


FORGED = [None, 3, [1], {"config": 3}, {"config": {}, "objects": [1]}, {"config": {"a": torch.zeros(2)}, "objects": {}}]


@pytest.mark.usefixtures("without_pictures")
def test_a_forged_checkpoint_tells_nothing(tmp_path):
    for number, saved in enumerate(FORGED):
        run = begin(tmp_path, number)
        (run / "config.yaml").unlink()
        (run / "checkpoints").mkdir()
        torch.save({"federated": {"settings": saved}}, run / "checkpoints/a.ckpt")
    check_report(tmp_path, [])


FOLDERS = [b"\xff\xfe", b"two\nlines", b"\x1b[2J\x07", b"$_<b>&|%", "\u202egnp".encode(), b"[/b]"]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_with_any_name(tmp_path, name):
    for number in range(3):
        run = begin(tmp_path / "runs" / os.fsdecode(name), number)
        (run / "config.yaml").unlink()
    (run / "metrics.csv").write_text("none")
    said = say(f"report {tmp_path / 'runs'} --output {tmp_path}/out")
    page = (tmp_path / "out/report.html").read_text("utf-8").replace("\u00a0", " ")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert all(letter.isprintable() or letter == "\n" for letter in said.err + said.out + page)
    said = say(f"report {shlex.quote(str(run.parent / '0'))}")
    assert (said.code, said.out.count("\n")) == (0, 1)


@pytest.mark.usefixtures("without_pictures")
def test_a_path_without_a_run_keeps_none_from_the_page(tmp_path):
    run = begin(tmp_path)
    (tmp_path / "none").mkdir()
    said = say(f"report {tmp_path}/none {run} {'x' * 5000} {tmp_path}/gone --output {tmp_path}/out")
    assert (said.code, said.err.count(" is left out: ")) == (1, 3)
    assert (tmp_path / "out/report.html").is_file()
    (run / "metrics.csv").write_text("none")
    assert f"error: {run / 'metrics.csv'} must have a row for each round" in refusal(f"report {run}", 1)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("make", [folder, dangling, loop, pipe])
def test_a_report_is_written_or_refused_in_one_sentence(tmp_path, make):
    run = begin(tmp_path)
    (tmp_path / "file").touch()
    make(tmp_path / "out")
    make(run / "report.html")
    for output in (f"{tmp_path}/file/below", f"{tmp_path}/file", f"{tmp_path}/out", run):
        said = say(f"report {run} --output {output}")
        assert said.code == 0 or said.err.count("\n") == 1
