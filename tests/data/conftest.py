"""What all tests of sources share."""

import pytest

from fl_lightning.data import published


@pytest.fixture(autouse=True)
def tiny_files_are_not_refused(monkeypatch):
    """Files of a few images have the layout of published sets, not their numbers; test_published.py has these."""
    monkeypatch.setattr(published, "PUBLISHED", {})
