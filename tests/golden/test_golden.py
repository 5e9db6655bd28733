"""Every golden case, through the functions and the loop that training really uses."""

from pathlib import Path

import pytest

from . import (
    adapters_fn,
    adapters_method,
    baseline_rounds,
    baseline_steps,
    changing,
    fedcl,
    feded,
    fedka,
    fn_measures,
    heterogeneity,
    knfu,
    personal,
    timed,
    tuned,
)
from .golden import Case, differences, load

HERE = Path(__file__).parent
PAPERS = (
    baseline_rounds,
    baseline_steps,
    changing,
    fedcl,
    feded,
    fedka,
    heterogeneity,
    knfu,
    personal,
    timed,
    tuned,
)
"""Modules with tables FN, METHOD and E2E of their own."""
ADAPTERS = {
    "fn": adapters_fn.ADAPTERS
    | fn_measures.ADAPTERS
    | {name: run for paper in PAPERS for name, run in getattr(paper, "FN", {}).items()},
    "method": adapters_method.ADAPTERS
    | {name: run for paper in PAPERS for name, run in paper.METHOD.items()}
    | {f"e2e:{name}": run for paper in PAPERS for name, run in paper.E2E.items()},
}
PENDING = {"fn": adapters_fn.PENDING, "method": adapters_method.PENDING}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" not in metafunc.fixturenames:
        return
    folders = [HERE, *map(Path, metafunc.config.getoption("golden_dir", []))]
    parameters = []
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise pytest.UsageError(f"--golden-dir must name a folder with golden files (*.json), got {folder}")
        for file in files:
            label = file.stem if folder == HERE else f"{folder.name}/{file.stem}"
            for case in load(file):
                name = pending_name(case)
                pending = pytest.mark.xfail(reason=f"{name} comes with: {PENDING[case.table].get(name)}", run=False)
                marks = [pending] if name else []
                parameters.append(pytest.param(case, id=f"{label}:{case.id}", marks=marks))
    metafunc.parametrize("case", parameters)


def pending_name(case: Case) -> str | None:
    """Under which name a case waits for its issue: that of its method, or `NAME[setting=value]`; None: it does not."""
    settings = {**case.inputs, **case.inputs.get("cfg", {})}
    values = [f"{case.name}[{name}={value}]" for name, value in settings.items() if isinstance(value, str)]
    own = [case.name] if case.name not in ADAPTERS[case.table] else []
    return next((name for name in own + values if name in PENDING[case.table]), None)


def test_case(case: Case) -> None:
    adapter = ADAPTERS[case.table].get(case.name)
    if adapter is None:
        pytest.fail(
            f"no adapter for {case.table} {case.name!r} of {case.file}; write one in "
            f"adapters_{case.table}.py, or list the name in PENDING there if its issue has not come",
            pytrace=False,
        )
    found = differences(adapter(case.inputs), case.expected, rtol=case.rtol, atol=case.atol, where=case.id)
    more = [f"... and {len(found) - 10} more"] if len(found) > 10 else []
    if found:
        pytest.fail("\n".join(found[:10] + more), pytrace=False)


@pytest.mark.parametrize("other", [lambda x: -abs(x), lambda x: 1e3 * x - 7], ids=["negative", "large"])
def test_unlabelled_samples_may_have_any_values(other) -> None:
    """The server's samples of FedDF have no labels in the file, and none are made of them."""
    case = next(one for one in load(HERE / "trajectories_0.json") if one.name == "e2e:feddf")
    adapter = ADAPTERS["method"][case.name]
    assert adapter({**case.inputs, "unlabelled": other(case.inputs["unlabelled"])})["rounds"]


@pytest.mark.parametrize("table", ["fn", "method"])
def test_no_name_is_both_adapted_and_pending(table: str) -> None:
    both = sorted(ADAPTERS[table].keys() & PENDING[table].keys())
    assert not both, f"{both} have an adapter: remove them from PENDING in adapters_{table}.py"


@pytest.mark.parametrize("table", ["fn", "method"])
def test_every_pending_name_has_a_case(table: str) -> None:
    shipped = {pending_name(case) for file in HERE.glob("*.json") for case in load(file) if case.table == table}
    unknown = sorted(PENDING[table].keys() - shipped)
    assert not unknown, f"{unknown} stand in PENDING but occur in no shipped golden file"


STACKED = [case for case in load(HERE / "scenarios_0.json") if case.name == "scenarios" and "FedLwF" not in case.id]


@pytest.mark.parametrize("stacked", STACKED, ids=lambda stacked: stacked.id)
def test_clients_whose_data_change_are_trained_in_stacks_as_well(stacked: Case) -> None:
    """FedLwF has a teacher for each client, so that it is never stacked."""
    values = changing.run_tasks(stacked.inputs, chunk=4)
    found = differences(values, stacked.expected, rtol=stacked.rtol, atol=stacked.atol, where=stacked.id)
    assert not found, "\n".join(found[:10])
