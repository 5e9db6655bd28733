"""Starts a SuperLink and SuperNodes on this machine, with TLS and node authentication, which end with the block."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
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
    """Holds the processes of a federation. All processes, and those that they started, end with the block.

    Args:
        folder: Folder of certificates, keys, logs and Flower's own files.
        simulates: Number of nodes that the SuperLink simulates by Ray. 0 means that SuperNodes are started instead.
    """

    def __init__(self, folder: Path, simulates: int = 0) -> None:
        self.folder = folder
        self.simulates = simulates
        self.port = free_port()
        folder.mkdir(parents=True, exist_ok=True)
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(folder / "home"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        self.environment = os.environ | OFFLINE | own
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Deployment":
        self._certificate()
        self._connection()
        self.start_link()
        return self

    def __exit__(self, *error) -> None:
        for name in reversed(list(self.processes)):
            self.kill(name, signal.SIGTERM)
        # Ray's daemons leave the session.
        for process in self.running():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(self.running(), 15)
        assert alive == []

    def running(self) -> list[psutil.Process]:
        """Return the processes of this deployment that run. All have its folder in their environment."""
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
        (self.folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        private = key.private_bytes(
            encoding=serialization.Encoding.PEM,
            format=serialization.PrivateFormat.PKCS8,
            encryption_algorithm=serialization.NoEncryption(),
        )
        (self.folder / "server.key").write_bytes(private)

    def key(self, name: str) -> Path:
        """Make the key pair of a node once, in SSH's form, and return the path of the private key."""
        path = self.folder / name
        if not path.exists():
            key = ec.generate_private_key(ec.SECP384R1())
            private = key.private_bytes(
                encoding=serialization.Encoding.PEM,
                format=serialization.PrivateFormat.OpenSSH,
                encryption_algorithm=serialization.NoEncryption(),
            )
            public = key.public_key().public_bytes(
                encoding=serialization.Encoding.OpenSSH,
                format=serialization.PublicFormat.OpenSSH,
            )
            path.write_bytes(private)
            path.with_suffix(".pub").write_bytes(public)
        return path

    def _connection(self) -> None:
        (self.folder / "home").mkdir(exist_ok=True)
        lines = [
            "[superlink]",
            'default = "here"',
            "",
            "[superlink.here]",
            f'address = "127.0.0.1:{self.port}"',
        ]
        if self.simulates:
            lines += [
                "insecure = true",
                f"options.num-supernodes = {self.simulates}",
                "options.backend.client-resources.num-cpus = 1",
                "options.backend.init-args.num-cpus = 1",
            ]
        else:
            lines.append(f'root-certificates = "{self.folder}/ca.crt"')
        (self.folder / "home" / "config.toml").write_text("\n".join(lines) + "\n")

    # --- processes

    def start(self, name: str, program: str, words: Sequence[str | Path]) -> subprocess.Popen:
        """Start a process in a session of its own, with its output in a file.

        Args:
            name: Name of the process and its file.
            program: Name of the program.
            words: Its arguments.
        """
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / program), *(str(word) for word in words)],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def start_link(self) -> None:
        words = ["--port", str(self.port), "--database", self.folder / "state.db"]
        words.append("--disable-runtime-dependency-installation")
        if self.simulates:
            words += ["--insecure", "--simulation"]
        else:
            words += ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "ca.crt", "--ssl-keyfile", "server.key"]
            words.append("--enable-supernode-auth")
        self.start("link", "flower-superlink", words)
        self.until(self._listens, 60)

    def _listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def register(self, name: str) -> None:
        self.flwr(["supernode", "register", self.key(name).with_suffix(".pub"), "here"])

    def start_node(self, name: str, data: Path) -> None:
        words = [
            *["--superlink", f"127.0.0.1:{self.port}"],
            *["--root-certificates", "ca.crt"],
            *["--host", "127.0.0.1"],
            *["--port", str(free_port())],
            *["--auth-supernode-private-key", self.key(name)],
            *["--node-config", f'data="{data}"'],
        ]
        self.start(name, "flower-supernode", words)

    def restart_node(self, name: str, data: Path) -> None:
        """Start a node whose process was killed. For a minute SuperLink takes the node for online and refuses it."""
        before = self.log(name).count("SuperNode ID:")

        def is_there() -> bool:
            if name not in self.processes or self.processes[name].poll() is not None:
                self.start_node(name, data)
            return self.log(name).count("SuperNode ID:") > before

        self.until(is_there, 240)

    def flwr(self, words: Sequence[str | Path], timeout: float = 120) -> str:
        """Run one of Flower's commands, and return what it printed."""
        ran = subprocess.run(
            [str(BIN / "flwr"), *(str(word) for word in words)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        printed = ran.stdout + ran.stderr
        assert ran.returncode == 0, printed
        return printed

    def run(self, app: Path = EXAMPLE, timeout: float = 600, **settings: str | float) -> str:
        """Run an app with settings of its configuration, and return what it printed."""
        return self.flwr(self.command(app, **settings), timeout=timeout)

    def command(self, app: Path = EXAMPLE, **settings: str | float) -> list[str | Path]:
        """Return the arguments of `flwr` that run an app."""
        words = ["run", app, "here", "--stream"]
        for name, value in settings.items():
            written = value if isinstance(value, float) else quoted(value)
            words += ["--run-config", f"{name.replace('_', '-')}={written}"]
        return words

    def app_of(self, kind: str, name: str) -> psutil.Process | None:
        """Return the process of an app below one of the started processes, or None."""
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
