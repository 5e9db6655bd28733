"""App of the server."""

from pathlib import Path

from fl_lightning.flower.apps import server_app

app = server_app(Path(__file__).with_name("clinics.yaml"))
