"""Runs two processes through the command line with a mishap each: `python ends.py FOLDER CASE...`.

A case is `HOW,RANK,START[,ROUND]` with START popen, fork, spawn or torchrun. All runs are forked from this process, so
that nothing is imported twice. Each has a session and a folder of its own. FOLDER/CASE.json gets output and end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil

from fl_lightning.__main__ import main
from tests.commands import CONFIGS
from tests.processes.forked import exit_code
from tests.processes.mishap import STARTER

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 15
"""Seconds for which a process may be silent."""

LONGEST = 150
"""Seconds after which a run that has not ended is killed."""


STARTED_BY_COMMAND = {
    "popen": ["-m", "fl_lightning"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "fl_lightning"],
}
"""Arguments of Python for a start by which each rank has a command line of its own."""


def words(case):
    """Return the command line of a case."""
    how, rank, start, *rounds = case
    round_idx = rounds[0] if rounds else 1
    # Lightning sees that torchrun has started the ranks.
    start = start.replace("torchrun", "popen")
    strategy = "fl_lightning.distributed.ClientParallelStrategy"
    mishap = f"--trainer.callbacks tests.processes.mishap.Mishap --trainer.callbacks.how {how}"
    return (
        f"fit -c {CONFIGS}/experiment/digits_fedavg.yaml --model.local_epochs 1 --model.max_local_steps 1 "
        f"--model.threads 1 --trainer.max_epochs 3 --trainer.enable_progress_bar false --trainer.devices 2 "
        f"--trainer.strategy {strategy} --trainer.strategy.process_timeout {TIMEOUT} "
        f"--trainer.strategy.start_method {start} {mishap} --trainer.callbacks.rank {rank} "
        f"--trainer.callbacks.round_idx {round_idx}"
    ).split()


def start_run(folder, case):
    """Start a run in a session of its own, and return its process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir(folder)
        os.environ[STARTER] = str(os.getpid())
        # A shell's background jobs ignore the first signal, and those of `nohup` the second.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT), 2)
        _, _, start, *_ = case
        started_by = STARTED_BY_COMMAND.get(start)
        if started_by is not None:
            # Lightning starts the other rank with the command of this process.
            os.environ["PYTHONPATH"] = str(ROOT)
            os.execv(sys.executable, [sys.executable, *started_by, *words(case)])
        main(words(case))
        os._exit(0)
    except SystemExit as stop:
        sys.stderr.flush()
        os._exit(int(stop.code or 0))
    except BaseException as error:
        sys.stderr.write(f"TRACEBACK {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(70)


def of_run(starter):
    """Return the processes of a run that have not ended. Torchrun starts each rank in a session of its own."""
    found = []
    for process in psutil.process_iter():
        try:
            in_session = os.getsid(process.pid) == starter
            is_started = in_session or process.environ().get(STARTER) == str(starter)
            if is_started and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def run(folder, name):
    """Run a case to its end, and return what it left."""
    at = folder / name
    at.mkdir(parents=True)
    child = start_run(at, name.split(","))
    code = exit_code(child, seconds=LONGEST)
    struck = at / "struck"
    seconds = time.time() - struck.stat().st_mtime if struck.exists() else None
    until = time.monotonic() + 15
    while code is not None and of_run(child) and time.monotonic() < until:
        time.sleep(0.1)
    left = of_run(child)
    for process in left:
        process.kill()
    if code is None:
        os.waitpid(child, 0)
    return {
        "code": code,
        "seconds": seconds,
        "left": len(left),
        "files": [str(path.relative_to(at)) for path in at.rglob("*") if path.is_file()],
        "out": (at / "out").read_text(),
        "err": (at / "err").read_text(),
    }


if __name__ == "__main__":
    for each in sys.argv[2:]:
        found = run(Path(sys.argv[1]), each)
        (Path(sys.argv[1]) / f"{each}.json").write_text(json.dumps(found))
        if os.environ.get("SHOW"):
            print("===", each, found["code"], found["seconds"], "left", found["left"])
            print(found["err"], [name.partition("steps=1/")[2] for name in found["files"]], flush=True)
