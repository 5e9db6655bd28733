"""A SuperLink and SuperNodes on this machine, with TLS and node authentication, which end with the block."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower"
CLINICS = ROOT / "examples" / "clinics"
BIN = Path(sys.executable).parent
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class Deployment:
    """Processes of a federation; a process and all that it started end with the block.

    Args:
        folder: of certificates, keys, logs and Flower's own files.
        simulates: whether the SuperLink runs simulations (Ray), with so many nodes; 0: SuperNodes are started.
    """

    def __init__(self, folder: Path, simulates: int = 0) -> None:
        self.folder = folder
        self.simulates = simulates
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.environment = os.environ | OFFLINE | threads | {"FLWR_HOME": str(folder / "home")}
        self.environment["PATH"] = f"{BIN}{os.pathsep}{self.environment['PATH']}"
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Deployment":
        self._certificate()
        self._connection()
        self.start_link()
        return self

    def __exit__(self, *error) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name, signal.SIGTERM)
        for process in self.left():  # Ray's daemons leave the session
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert psutil.wait_procs(self.left(), 15)[1] == []

    def left(self) -> list[psutil.Process]:
        """Processes of this deployment that run: all have its folder in their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("FLWR_HOME") == self.environment["FLWR_HOME"]:
                    found.append(process)
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]

    # --- files

    def _certificate(self) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        now = datetime.now(UTC)
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=2))
            .add_extension(names, critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA384())
        )
        none = serialization.NoEncryption()
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none
        (self.folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (self.folder / "server.key").write_bytes(key.private_bytes(*form))

    def key(self, name: str) -> Path:
        """A node's key pair in SSH's form, made once; the private one's path."""
        path = self.folder / name
        if not path.exists():
            key = ec.generate_private_key(ec.SECP384R1())
            form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            path.write_bytes(key.private_bytes(*form))
            public = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
            path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(*public))
        return path

    def _connection(self) -> None:
        (self.folder / "home").mkdir(exist_ok=True)
        secure = f'root-certificates = "{self.folder}/ca.crt"\n'
        if self.simulates:
            options = f"options.num-supernodes = {self.simulates}\noptions.backend.client-resources.num-cpus = 1\n"
            secure = f"insecure = true\n{options}options.backend.init-args.num-cpus = 1\n"
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{secure}'
        (self.folder / "home" / "config.toml").write_text(text)

    # --- processes

    def start(self, name: str, *words: str | Path) -> subprocess.Popen:
        """Start a process in a session of its own, with its output in a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / words[0]), *map(str, words[1:])],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def start_link(self) -> None:
        words = ["--insecure", "--simulation"]
        if not self.simulates:
            tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "ca.crt", "--ssl-keyfile", "server.key"]
            words = [*tls, "--enable-supernode-auth"]
        more = ["--port", str(self.port), "--database", self.folder / "state.db"]
        self.start("link", "flower-superlink", *words, *more, "--disable-runtime-dependency-installation")
        self.until(self._listens, 60)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def register(self, name: str) -> None:
        self.flwr("supernode", "register", self.key(name).with_suffix(".pub"), "here")

    def start_node(self, name: str, data: Path) -> None:
        words = ["--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.crt", "--host", "127.0.0.1"]
        words += ["--auth-supernode-private-key", self.key(name), "--node-config", f'data="{data}"']
        self.start(name, "flower-supernode", *words, "--port", str(free_port()))

    def restart_node(self, name: str, data: Path) -> None:
        """Start a node whose process was killed: for a minute SuperLink takes it for online and turns it away."""
        before = self.log(name).count("SuperNode ID:")

        def is_there() -> bool:
            if name not in self.processes or self.processes[name].poll() is not None:
                self.start_node(name, data)
            return self.log(name).count("SuperNode ID:") > before

        self.until(is_there, 240)

    def flwr(self, *words: str | Path, timeout: float = 120) -> str:
        """Run one of Flower's commands; returns what it printed."""
        command = [str(BIN / "flwr"), *map(str, words)]
        ran = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    def run(self, app: Path = EXAMPLE, timeout: float = 600, **settings: str | float) -> str:
        """Run the example, with settings of its configuration; returns what it printed."""
        return self.flwr(*self.command(app, **settings), timeout=timeout)

    def command(self, app: Path = EXAMPLE, **settings: str | float) -> list[str | Path]:
        """Arguments of `flwr` that run an app."""
        values = {n.replace("_", "-"): v if isinstance(v, float) else quoted(v) for n, v in settings.items()}
        more = [part for name, value in values.items() for part in ("--run-config", f"{name}={value}")]
        return ["run", app, "here", "--stream", *more]

    def app_of(self, kind: str, name: str) -> psutil.Process | None:
        """The process of an app that one of the started processes has under it."""
        with suppress(psutil.Error):
            for process in psutil.Process(self.processes[name].pid).children(recursive=True):
                if any(word.endswith(kind) for word in process.cmdline()[:3]):
                    return process
        return None

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """End a process and all of its session."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)

    def until(self, is_so, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            logs = [path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < end, "\n".join(logs)
            time.sleep(0.2)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


def quoted(text: str) -> str:
    return '"' + str(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
