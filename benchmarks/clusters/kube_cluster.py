"""A control plane of Kubernetes on loopback: etcd, kube-apiserver and kube-scheduler, with our service beside them.

No kubelet and no controller runs: pods are admitted, scheduled and bound, but nothing starts.
"""

import base64
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
PROGRAMS = ("etcd", "kube-apiserver", "kube-scheduler", "kubectl")
DEVICE_CLASS = "shared-gpu.example.com"
_TOKEN = "token-of-the-administrator"  # of a cluster that lives for a minute on loopback
_GATES = "DRAConsumableCapacity=true"
_START_SECONDS = 120


def programs() -> Path | None:
    """Return the folder of the programs, as KUBE_BIN or the convention of envtest names it."""
    name = os.environ.get("KUBE_BIN") or os.environ.get("KUBEBUILDER_ASSETS")
    return Path(name).resolve() if name else None


def reason_to_skip() -> str | None:
    """Return why no control plane can be started here; None if it can."""
    folder = programs()
    if folder is None:
        return f"name the folder of {', '.join(PROGRAMS)}: make kube KUBE_BIN=DIR, or KUBEBUILDER_ASSETS"
    if missing := [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]:
        return f"no {', '.join(missing)} in {folder}"
    return None if shutil.which("openssl") else "needs openssl"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Cluster:
    """A control plane that is being started."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._bin = programs() or folder
        self.api, self.service = free_port(), free_port()
        self._make_certificates()
        self._write_files()

    def start(self) -> None:
        """Start everything, and wait until it answers."""
        etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._run(
            "etcd", f"--data-dir={self.folder}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}", "--unsafe-no-fsync",
        )  # fmt: skip
        key = self.folder / "tls.key"
        self._run(
            "kube-apiserver", f"--etcd-servers={etcd}", f"--secure-port={self.api}", "--bind-address=127.0.0.1",
            f"--tls-cert-file={self.folder}/tls.crt", f"--tls-private-key-file={key}",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
            f"--token-auth-file={self.folder}/tokens.csv", "--authorization-mode=RBAC", f"--feature-gates={_GATES}",
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
        )  # fmt: skip
        self._wait(self.api, "/readyz")
        self._start_service()
        self._run("kube-scheduler", f"--config={self.folder}/scheduler.yaml", f"--feature-gates={_GATES}",
                  "--secure-port=0")  # fmt: skip

    def _start_service(self) -> None:
        words = [
            sys.executable, "-m", "vramcast", "serve", "--port", str(self.service), "--quiet", "--resource", "dra",
            "--device-class", DEVICE_CLASS, "--device", "a100_40gb",
            "--tls-cert", f"{self.folder}/tls.crt", "--tls-key", f"{self.folder}/tls.key",
        ]  # fmt: skip
        account = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.api)}
        self.process = self._started("service", words, account | {"VRAMCAST_CLUSTER_ACCOUNT": str(self.folder)})
        self._wait(self.service, "/readyz")

    def kubectl(self, *words: str, text: str | None = None, check: bool = True) -> str:
        """Run kubectl, and return what it prints."""
        command = [str(self._bin / "kubectl"), f"--kubeconfig={self.folder}/kubeconfig", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr}")
        return done.stdout + done.stderr

    def apply(self, *things: Any) -> str:
        """Create objects."""
        return self.kubectl("create", "-f", "-", text="\n---\n".join(json.dumps(thing) for thing in things))

    def get(self, kind: str, name: str) -> Any:
        """Return an object."""
        return json.loads(self.kubectl("get", kind, name, "-o", "json"))

    def clear(self) -> None:
        """Remove what a test made."""
        for kind in ("pods", "resourceclaims", "resourceclaimtemplates"):
            self.kubectl("delete", kind, "--all", "--force", "--grace-period=0", check=False)
        self.kubectl("delete", "resourceslices,nodes", "--all", check=False)

    def filter_calls(self) -> int:
        """Return how often the scheduler asked the extender to filter so far."""
        text = self._read(self.service, "/metrics")
        counts = re.findall(r'vramcast_requests_total\{path="/k8s/filter",status="\d+"\} (\S+)', text)
        return sum(int(float(count)) for count in counts)

    def webhooks(self) -> Any:
        """Return our webhooks with the address and the CA of this service."""
        documents = yaml.safe_load_all((DEPLOY / "vramcast.yaml").read_text(encoding="utf-8"))
        configuration = next(item for item in documents if item["kind"] == "MutatingWebhookConfiguration")
        authority = base64.b64encode((self.folder / "ca.crt").read_bytes()).decode()
        for hook in configuration["webhooks"]:
            url = f"https://127.0.0.1:{self.service}{hook['clientConfig']['service']['path']}"
            hook["clientConfig"] = {"url": url, "caBundle": authority}
        return configuration

    def _make_certificates(self) -> None:
        def openssl(*words: str) -> None:
            subprocess.run(["openssl", *words], cwd=self.folder, check=True, capture_output=True, timeout=60)

        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-days", "2",
                "-subj", "/CN=test")  # fmt: skip
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=local")
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n", encoding="utf-8")
        openssl("x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out",
                "tls.crt", "-days", "2", "-extfile", "names")  # fmt: skip

    def _write_files(self) -> None:
        (self.folder / "token").write_text(_TOKEN, encoding="utf-8")
        (self.folder / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n', encoding="utf-8")
        authority = str(self.folder / "ca.crt")
        server = {"server": f"https://127.0.0.1:{self.api}", "certificate-authority": authority}
        configuration = {
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "admin", "user": {"token": _TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        }  # fmt: skip
        (self.folder / "kubeconfig").write_text(json.dumps(configuration), encoding="utf-8")
        scheduler = yaml.safe_load((DEPLOY / "scheduler.yaml").read_text(encoding="utf-8"))
        scheduler["clientConnection"]["kubeconfig"] = str(self.folder / "kubeconfig")
        scheduler["leaderElection"] = {"leaderElect": False}
        extender = scheduler["extenders"][0]
        extender |= {"urlPrefix": f"https://127.0.0.1:{self.service}/k8s", "tlsConfig": {"caFile": authority}}
        (self.folder / "scheduler.yaml").write_text(json.dumps(scheduler), encoding="utf-8")

    def _run(self, name: str, *words: str) -> None:
        self._started(name, [str(self._bin / name), *words], {})

    def _started(self, name: str, words: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **environment}
            )
        self._stack.callback(process.wait, 30)
        self._stack.callback(process.kill)
        return process

    def _read(self, port: int, path: str) -> str:
        request = urllib.request.Request(
            f"https://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {_TOKEN}"}
        )
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
        with opener.open(request, timeout=5) as response:
            text: str = response.read().decode()
            return text

    def _wait(self, port: int, path: str) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with suppress(OSError):
                self._read(port, path)
                return
            time.sleep(0.2)
        logs = "\n".join(path.read_text(encoding="utf-8")[-1500:] for path in self.folder.glob("*.log"))
        raise RuntimeError(f"expected an answer at port {port} within {_START_SECONDS} s, found none:\n{logs}")


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Yield a running control plane, and leave no process and no file behind."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="vramcast-kube-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(folder, stack)
        cluster.start()
        yield cluster
