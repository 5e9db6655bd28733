"""Records of what each setting of a run affects."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Effect = Literal["data", "values", "costs", "nothing"]
"""What a setting affects.

- `data`: The samples of the clients, of the splits, or the cohorts.
- `values`: The weights and the logged values in another way.
- `costs`: Seconds, memory, or what is on record of a run. The weights are the same up to the order of sums.
- `nothing`: Where a run is written, how it is shown, or how many rounds it has. More rounds continue a run.
"""


@dataclass(frozen=True)
class SettingRecord:
    """Says what a setting affects.

    Args:
        affects: What the setting affects.
        is_seed: Whether the runs of one group differ in the setting.
        counts_or_shares: Whether a whole number is a count and a float a share, so that 1 and 1.0 differ.
    """

    affects: Effect
    is_seed: bool = False
    counts_or_shares: bool = False


VALUES = SettingRecord("values")
COSTS = SettingRecord("costs")
NOTHING = SettingRecord("nothing")

RECORDS: Mapping[str, SettingRecord] = MappingProxyType(
    {
        "allow_changes": NOTHING,
        "best": COSTS,
        "ckpt_path": NOTHING,
        "config": NOTHING,
        "data": SettingRecord("data"),
        "data.batch_size": VALUES,
        "data.eval_batch_size": COSTS,
        "data.local_work.late": VALUES,
        "data.pooled": VALUES,
        "data.sampling_seed": SettingRecord("data", is_seed=True),
        "data.seed": SettingRecord("data", is_seed=True),
        "data.scenario.cumulative": VALUES,
        "data.scenario.samples": VALUES,
        "data.shuffle": VALUES,
        "direction": NOTHING,
        "model.chunk": COSTS,
        "model.evaluate_clients_every": COSTS,
        "model.evaluate_training_every": COSTS,
        "model.fine_tuning": COSTS,
        "model.evaluate_every_seconds": COSTS,
        "model.max_seconds": NOTHING,
        "model.metrics": COSTS,
        "model.planned_rounds": COSTS,
        "model.seed": SettingRecord("values", is_seed=True),
        "model.store": COSTS,
        "model.threads": COSTS,
        "plots": NOTHING,
        "return_predictions": NOTHING,
        "seed_everything": SettingRecord("values", is_seed=True),
        "trainer.accelerator": COSTS,
        "trainer.barebones": COSTS,
        "trainer.callbacks": COSTS,
        "trainer.default_root_dir": NOTHING,
        "trainer.detect_anomaly": COSTS,
        "trainer.devices": COSTS,
        "trainer.enable_autolog_hparams": NOTHING,
        "trainer.enable_checkpointing": NOTHING,
        "trainer.enable_model_summary": NOTHING,
        "trainer.enable_progress_bar": NOTHING,
        "trainer.fast_dev_run": NOTHING,
        "trainer.limit_predict_batches": SettingRecord("values", counts_or_shares=True),
        "trainer.limit_test_batches": SettingRecord("values", counts_or_shares=True),
        "trainer.limit_val_batches": SettingRecord("values", counts_or_shares=True),
        "trainer.log_every_n_steps": NOTHING,
        "trainer.logger": NOTHING,
        "trainer.max_epochs": NOTHING,
        "trainer.max_steps": NOTHING,
        "trainer.max_time": NOTHING,
        "trainer.min_epochs": NOTHING,
        "trainer.min_steps": NOTHING,
        "trainer.model_registry": NOTHING,
        "trainer.num_nodes": COSTS,
        "trainer.num_sanity_val_steps": NOTHING,
        "trainer.plugins": COSTS,
        "trainer.profiler": COSTS,
        "trainer.strategy": COSTS,
        "verbose": NOTHING,
        "weights_only": NOTHING,
    }
)
"""The record of each setting by its dotted name. It holds for all settings below that have no record of their own."""

SEEDS = tuple(name for name, record in RECORDS.items() if record.is_seed)
"""Settings in which the runs of one group may differ."""


def record_of(name: str) -> SettingRecord:
    """Return the record of a setting, or of the nearest setting above it. A setting without one affects values.

    >>> record_of("data.partition.alpha").affects, record_of("trainer.logger.save_dir").affects, record_of("a").affects
    ('data', 'nothing', 'values')
    """
    while name:
        record = RECORDS.get(name)
        if record is not None:
            return record
        name = name.rpartition(".")[0]
    return VALUES


def is_fixed(name: str) -> bool:
    """Return True if a run that continues must have the setting with which it was begun."""
    return record_of(name).affects in ("data", "values")


def is_data(name: str) -> bool:
    """Return True for a setting of the samples, of their partition or of the cohorts."""
    return record_of(name).affects == "data"


def is_seed(name: str) -> bool:
    """Return True for a setting in which the runs of one group may differ."""
    return record_of(name).is_seed


def counts_or_shares(name: str) -> bool:
    """Return True for a setting in which 1 is a count and 1.0 a share."""
    return record_of(name).counts_or_shares


def distinguishes(name: str) -> bool:
    """Return True if two runs with other values of the setting are two runs, though one may be continued as the other.

    More rounds of a run are the same run.
    """
    return record_of(name).affects != "nothing"


# --- names ---


def below(name: str, other: str) -> bool:
    """Return True if a setting is `other` or an argument of `other`."""
    return name == other or name.startswith(f"{other}.")


def belongs_to_any(name: str, others: Iterable[str]) -> bool:
    """Return True if a setting is one of `others` or an argument of one of them."""
    return any(below(name, other) for other in others)


# --- digests ---

INPUTS = "data.inputs"
"""Name of the digest of the training samples. Those of other splits are below it, by the name of the split.

None means that samples have no digest. It is not compared, as in a checkpoint that has none.
"""

DIGESTS = ("data.labels", "data.clients", "data.class_names", "data.scenario.samples", INPUTS)
"""Settings of the run's identity that are digests, known from checkpoints only."""


def is_digest(name: str) -> bool:
    """Return True for a setting that is a digest, which no configuration tells."""
    return belongs_to_any(name, DIGESTS)
