"""App of the nodes."""

from pathlib import Path

from fl_lightning.flower.apps import client_app

app = client_app(Path(__file__).with_name("clinics.yaml"))
