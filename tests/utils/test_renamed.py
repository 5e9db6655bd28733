"""An argument under its old name is refused with the new one."""

import pytest

from fl_lightning.data import FederatedDataModule
from fl_lightning.methods import FedCL, FedKA, FedProx
from fl_lightning.utils.renamed import RENAMED, new_name, refuse_renamed

KINDS = {kind.__name__: kind for kind in (FedKA, FedCL, FederatedDataModule)}


class Sub(FedKA):
    """Of a user's own."""


@pytest.mark.parametrize(("name", "old"), [(name, old) for name, names in RENAMED.items() for old in names])
def test_an_old_name_is_refused_with_the_new_one(name, old):
    with pytest.raises(TypeError, match=f"{name}: the argument '{old}' was renamed to '{RENAMED[name][old]}'"):
        refuse_renamed(KINDS[name], ["net", old])


def test_other_arguments_and_other_classes_pass():
    refuse_renamed(FedKA, ["net", "optimizer"])
    refuse_renamed(FedProx, ["mu"])


def test_subclasses_inherit_the_renamed_arguments():
    assert new_name(Sub, "mu") == "max_anchors"
