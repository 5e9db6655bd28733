"""The settings that identify a run, compared when the run continues from a checkpoint."""

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.changing import ChangingSamples
from fl_lightning.data.checks import check_simulated
from fl_lightning.federation.code import tell_changed_code
from fl_lightning.federation.configured import flat
from fl_lightning.federation.described import described_value
from fl_lightning.federation.differences import Difference, differences
from fl_lightning.federation.effects import INPUTS, belongs_to_any, is_fixed
from fl_lightning.federation.files import INITIAL_WEIGHTS, fingerprints, tell_changed_files
from fl_lightning.federation.fingerprint import digest_of_inputs
from fl_lightning.federation.horizon import PLANNED, Horizon
from fl_lightning.federation.values import Settings, digest_of, hash_of_value, shortened
from fl_lightning.utils.files import content_digest

COMPARED_IN_EVALUATION = ("data.source", "data.labels", "data.num_classes", "data.input_shape", "model.client.net")
"""Settings that an evaluation compares: data and net."""

KNOWN_ONCE_READ = ("data.source", "data.labels", "data.class_names", "data.num_classes", "data.input_shape")
"""Settings of the objects of a run that samples decide, such as the mean by which pictures are normalized."""

OF_THE_DATA = ("num_clients", "unseen", "batch_size", "shuffle")
"""Settings of the data module that must be the same for all parties of a real federation."""

OF_THE_SERVER = (INITIAL_WEIGHTS,)
"""Settings of the loop that only the server of a real federation has."""


FILES_OF_COMMAND = ("config", "ckpt_path")
"""Options of a command that only name files. A continued run, which names others, is the same run to the last bit."""


class RunIdentity:
    """Holds the settings of a run, and the settings that may change when the run continues.

    Attributes:
        config: The settings of the parsed configuration. Empty without a configuration. The objects do not hold all
            of them.
        objects: The settings that the objects of the run hold.
        code: Digests of the source of the user's classes and functions, by name.
        files: Fingerprints of the files that sources read, by the name of the source, and of the initial weights.
        weights: Path of the initial weights. None means that they are drawn.
        horizon: The planned rounds. They are a setting of the run if something depends on them.
        allowed: Names of the settings that may change, each with all settings below it.
        changed: The allowed settings that have changed since the checkpoint.
    """

    def __init__(self, horizon: Horizon | None = None) -> None:
        self.config: Settings = {}
        self.objects: Settings = {}
        self.code: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.weights: str | None = None
        self._weights_when_begun: str | None = None
        """Fingerprint of the initial weights of a run that continues."""
        self.horizon = horizon or Horizon()
        self.allowed: list[str] = []
        self.changed: list[Difference] = []
        self._unknown: tuple[str, ...] = ()
        """Settings of the objects that nobody knows, because the samples of the run are not read."""

    def begin_run(self) -> None:
        """Forget the run before."""
        self.changed = []
        self._weights_when_begun = None

    def configure(self, config: Mapping[str, Any]) -> None:
        """Set the parsed configuration of the run, without the files that the command was given."""
        self.config = {name: value for name, value in flat(config).items() if name not in FILES_OF_COMMAND}

    def allow(self, names: Iterable[str]) -> None:
        """Let the settings of these names change."""
        for name in names:
            setting = name.replace(".init_args", "").removesuffix(".class_path")
            self.allowed.append(PLANNED if setting == f"model.{PLANNED}" else setting)

    def describe(self, settings: Settings, data: FederatedDataModule, fits: bool) -> None:
        """Set the settings of the objects of the run.

        Args:
            settings: The settings of client and parts, from `described_federation`.
            data: The data module of the run.
            fits: Whether the run is a fit, for which the samples of the clients are dealt.
        """
        settings = dict(settings)
        settings |= described_value("data", data)
        if data.scenario is not None and data.scenario.content():
            # The content of a file tells more than its place.
            settings.pop("data.scenario.path", None)
            settings["data.scenario.content"] = data.scenario.content()
        settings["data.participation"] = data.cohort.share
        settings.pop("data.cohort_size", None)  # the share tells it
        settings["data.sampling_seed"] = "secret" if data.secret_seed else data.cohort.seed
        self._unknown = ()
        if data.is_unread:
            self._unknown = KNOWN_ONCE_READ
        else:
            settings["data.labels"] = digest_of_labels(data)
        names = data.source.class_names
        settings["data.class_names"] = None if names is None else shortened([str(name) for name in names])
        if fits:
            dealt = data.client_samples().dealt
            settings["data.clients"] = digest_of([dealt.indices, dealt.ends])
            settings |= digests_of_inputs(data)
            samples = data.client_samples()
            if isinstance(samples, ChangingSamples):
                settings["data.scenario.samples"] = samples.digest()
            further = {f"data.extra_splits.{name}": source for name, source in data.extra_splits.items()}
            self.files = fingerprints({"data.source": data.source, **further}) | self._file_of_weights()
        if self.weights is not None:
            settings[INITIAL_WEIGHTS] = self.weights
        self.objects = settings

    def _file_of_weights(self) -> dict[str, str]:
        """Return the fingerprint of the initial weights by their name: those with which the run was begun."""
        fingerprint = self._weights_when_begun
        if fingerprint is None and self.weights is not None:
            fingerprint = content_digest(self.weights)
        return {} if fingerprint is None else {INITIAL_WEIGHTS: fingerprint}

    def state_dict(self) -> dict[str, Settings]:
        return {
            "config": self.config,
            "objects": self.objects,
            "code": dict(self.code),
            "files": dict(self.files),
            "horizon": self.horizon.state(),
        }

    def compare(self, saved: Mapping[str, Settings], evaluates: bool) -> None:
        """Compare the run with the settings of a checkpoint, and tell which code has changed.

        Args:
            saved: The settings, from `state_dict`.
            evaluates: Whether only data and net are compared.

        Raises:
            ValueError: A setting has changed that may not change.
        """
        changed = self._changed(saved)
        plans = {} if evaluates else self.horizon.changed(saved.get("horizon", {}))
        for name, (was, now) in plans.items():
            if name not in [difference.name for difference in changed]:
                changed.append(Difference(name, was=was, now=now))
        if evaluates:
            changed = [difference for difference in changed if belongs_to_any(difference.name, COMPARED_IN_EVALUATION)]
        refused = [difference for difference in changed if not belongs_to_any(difference.name, self.allowed)]
        if refused:
            raise ValueError(
                f"a run is continued with the settings it was begun with, but {'; '.join(map(str, refused))}; give it "
                f"those, start a new run, or let it change by --allow_changes {refused[0].name}"
            )
        self.changed = changed
        tell_changed_code(saved.get("code", {}), self.code)
        files = saved.get("files", {})
        tell_changed_files(files, self.files)
        self._weights_when_begun = files.get(INITIAL_WEIGHTS)

    def _changed(self, saved: Mapping[str, Settings]) -> list[Difference]:
        """Return the differences in what a continued run must have, each once."""
        is_complete = "code" in saved  # Checkpoints of 0.2.0 do not hold all settings.
        changed: list[Difference] = []
        same_weights = self._begins_with_weights_of(saved)
        for was, now, unknown in (
            (saved["config"], self.config, ()),
            (saved["objects"], self.objects, self._unknown),
        ):
            if not was or not now:
                continue
            known = [difference.name for difference in changed]
            for difference in differences(was, now, only_shared=not is_complete):
                if difference.name == INITIAL_WEIGHTS and same_weights:
                    continue
                if belongs_to_any(difference.name, unknown):
                    continue
                if is_fixed(difference.name) and not belongs_to_any(difference.name, known):
                    changed.append(difference)
        return changed

    def _begins_with_weights_of(self, saved: Mapping[str, Settings]) -> bool:
        """Return True if the file of the initial weights is that of the checkpoint, whatever its path."""
        # The command line compares its settings before `describe` has read any file.
        files = self.files or self._file_of_weights()
        fingerprint = files.get(INITIAL_WEIGHTS)
        return fingerprint is not None and fingerprint == saved.get("files", {}).get(INITIAL_WEIGHTS)


def digest_of_labels(data: FederatedDataModule) -> str:
    """Return the digest of the labels of the training samples, or of their number if the labels are not known."""
    train = data.split("train")
    labels = torch.tensor(len(train)) if train.known_labels is None else train.known_labels
    return digest_of([labels])


def digests_of_inputs(data: FederatedDataModule) -> Settings:
    """Return the digests of the samples that are loaded when a fit begins, by the names of settings.

    Sets that are taken from the training samples have none of their own.

    Args:
        data: The data module, whose clients' samples are dealt.
    """
    digests: Settings = {INPUTS: digest_of_inputs(data.split("train"), data.seed)}
    for name, split in data.loaded_splits.items():
        if name not in ("train", "shared") and not data.holdout_sizes.get(name):
            digests[f"{INPUTS}.{name}"] = digest_of_inputs(split, data.seed)
    return digests


def shared_settings(parts: Any, data: FederatedDataModule, precision: str, planned: int | None) -> dict[str, str]:
    """Return the digests of the settings and versions that must be the same for all parties of a real federation.

    Args:
        parts: The parts of the federation, whose net is not built.
        data: The data module of one party.
        precision: The precision of the Trainer.
        planned: The planned rounds of the run. None means no limit.

    Returns:
        The digests, by dotted name.

    Raises:
        ValueError: A setting is for simulations only.
    """
    check_simulated(data)
    settings = {name: value for name, value in parts.described(precision, planned).items() if is_fixed(name)}
    for name, value in parts.identity.config.items():
        if name.startswith("model.") and is_fixed(name) and name not in OF_THE_SERVER:
            settings[f"config.{name}"] = value
    for name in OF_THE_DATA:
        settings[f"data.{name}"] = getattr(data, name)
    for package in ("fl_lightning", "torch"):
        settings[f"version.{package}"] = version(package).partition("+")[0]
    return {name: hash_of_value(value) for name, value in settings.items()}
