"""Pages of reports in a browser: at two widths without errors, without overflow, with all pictures and charts."""

import json
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue

import pytest

from fl_lightning.reports.report import write_report
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.saved import find_runs, grouped, read_run
from tests.reports.saved_runs import settings, write_run, write_table

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEGABYTE = 1e6

FIRST = """<script>
const errors = [];
window.addEventListener("error", (event) => errors.push(String(event.message)), true);
window.addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
const complain = console.error;
console.error = (...words) => { errors.push(words.join(" ")); complain(...words); };
</script>"""
"""Script that collects the errors of a page, before all else."""

LAST = """<script>
window.addEventListener("load", () => setTimeout(async () => {
  for (const fold of document.querySelectorAll("details")) fold.open = true;
  const charts = [...document.querySelectorAll(".chart")];
  for (let turn = 0; turn < 60 && charts.some((place) => !place.children.length); turn += 1) {
    await new Promise((done) => setTimeout(done, 500));
  }
  const lines = () => Bokeh.documents.flatMap((doc) => [...doc.all_models]).filter((model) => model.name === METHOD);
  const boxes = [...document.querySelectorAll(".methods input")];
  const hides = boxes.map((box) => {
    METHOD = box.value;
    box.click();
    const hidden = lines().every((model) => !("visible" in model.properties) || !model.visible);
    box.click();
    return hidden && lines().length > 0;
  });
  const all = (root) => [...root.querySelectorAll("*")].flatMap((part) => {
    return [part, ...(part.shadowRoot ? all(part.shadowRoot) : [])];
  });
  const areas = () => all(charts[0]).filter((part) => part.classList.contains("bk-events"));
  for (let turn = 0; turn < 60 && !areas().length; turn += 1) {
    await new Promise((done) => setTimeout(done, 500));
  }
  const [area] = areas();
  const box = area.getBoundingClientRect();
  const place = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 3 };
  const mouse = { ...place, bubbles: true, composed: true, pointerType: "mouse", isPrimary: true, pointerId: 1 };
  for (const kind of ["pointerenter", "pointermove"]) {
    area.dispatchEvent(new PointerEvent(kind, mouse));
  }
  await new Promise((done) => setTimeout(done, 500));
  const tips = all(document.body).filter((part) => part.classList.contains("bk-tooltip-content"));
  const wide = document.documentElement.getBoundingClientRect().width;
  const verdict = {
    errors,
    wide,
    overflow: [...document.querySelectorAll("body *")]
      .filter((part) => part.getBoundingClientRect().right > wide + 1 && !part.closest(".scroll"))
      .map((part) => part.outerHTML.slice(0, 80)),
    broken: [...document.images].filter((image) => !(image.complete && image.naturalWidth)).length,
    nameless: [...document.images].filter((image) => !image.alt).length,
    charts: charts.length,
    drawn: charts.filter((place) => place.children.length).length,
    hides,
    tip: tips.map((part) => part.textContent).join(" "),
  };
  await fetch("/verdict", { method: "POST", body: JSON.stringify(verdict) });
}, 500));
let METHOD = null;
</script>"""
"""Script that opens all that is folded, clicks on each method, and sends what it sees to the server."""


def four_methods(folder):
    """Four methods, two numbers of clients and three seeds."""
    for number, client in enumerate(("FedAvg", "FedProx", "FedNTD", "MOON")):
        for clients in (2, 9):
            for seed in range(3):
                config = settings(client, seed)
                config["data"]["num_clients"] = clients
                curve = [0.2 + 0.05 * t + 0.02 * number + 0.01 * seed for t in range(6)]
                partition = [[5, 0, 1], [0, 7, 2]]
                write_run(folder / f"{client}-{clients}-{seed}", curve, config, partition=partition)


def one_run(folder):
    run = write_run(folder / "0", [0.2, 0.5, 0.4], settings("FedNTD", 0), partition=[[5, 0, 1], [0, 7, 2]])
    header = ["round", "client", "loss_before", "loss_after"]
    write_table(run / "clients.csv", header, [[0, 0, 2, 1], [2, 1, 1, 0.25]])


def two_hundred_runs(folder):
    for number in range(200):
        config = settings("FedAvg", 0, mu=f"{number / 1000}, a long name of a setting")
        write_run(folder / str(number), [0.2, 0.3 + number / 500], config)


def a_regression(folder):
    for seed in range(2):
        run = write_run(folder / str(seed), [0.1], settings("FedAvg", seed))
        rows = [[t, 3.0 / (t + 1), 4.0 / (t + 1)] for t in range(4)]
        write_table(run / "metrics.csv", ["round", "val/mse", "train/loss"], rows)


def long_names(folder):
    for number in range(9):
        config = settings("FedAvg", 0, name="x" * 120 + str(number))
        write_run(folder / str(number), [0.2, float("nan") if number == 3 else 0.4], config)


KINDS = {
    "four methods": (four_methods, {}),
    "one run": (one_run, {}),
    "200 runs": (two_hundred_runs, {}),
    "regression": (a_regression, {}),
    "long names": (long_names, {}),
    "tuned, with a failure": (
        four_methods,
        {
            "notes": [f"Tuned in validation: lr={value} for FedAvg of 0.01, 0.1" for value in (0.01, 0.1)],
            "answer": [
                Table("Final", ["method", "x"], [[TableCell("FedAvg"), TableCell("seed 0 failed: " + "why " * 40)]])
            ],
            "command": "fl-lightning compare " + "--model.client.beta=0.123456789 " * 20,
        },
    ),
}


class Watched(BaseHTTPRequestHandler):
    """Gives a browser one page, and takes what its script saw.

    The server has the page as `text`, and takes what was seen into `seen`.
    """

    def do_GET(self):
        self.send_response(200 if self.path == "/" else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        if self.path == "/":
            self.wfile.write(self.server.text.encode())

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.seen.put(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def look(path, width):
    """Open a page in the browser, and return what the script saw."""
    # A window of the browser is never as narrow as a phone; the rules for narrow pages hold below 640 pixels.
    narrow = f"<style>html {{ width: {width}px; }}</style><link rel='icon' href='data:,'>"
    text = path.read_text(encoding="utf-8").replace("<head>", f"<head>{FIRST}").replace("</head>", f"{narrow}</head>")
    with ThreadingHTTPServer(("127.0.0.1", 0), Watched) as server:
        server.text = text.replace("</body>", f"{LAST}</body>")
        server.seen = Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        profile = path.parent / f"browser-{width}"
        command = [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        command += [
            f"--window-size={width},30000",
            "--remote-debugging-port=0",
            f"http://127.0.0.1:{server.server_port}/",
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                return server.seen.get(timeout=120)
            finally:
                browser.kill()
                server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_whole_at_both_widths(tmp_path, kind):
    make, options = KINDS[kind]
    make(tmp_path / "runs")
    groups = grouped(map(read_run, find_runs([tmp_path / "runs"])))
    page = write_report(groups, tmp_path / "out", **options)
    assert page.stat().st_size < 5 * MEGABYTE
    for width in (1280, 420):
        seen = look(page, width)
        assert seen["wide"] == width
        assert seen["errors"] == []
        assert seen["overflow"] == []
        assert (seen["broken"], seen["nameless"]) == (0, 0)
        assert seen["drawn"] == seen["charts"] > 0
        assert all(seen["hides"])
        assert re.match(r"round \d+.*\d", seen["tip"])  # the values at the pointer
