"""The backend `cuda` in a process with the stub of NVML, for tests in a process without it."""

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from nvml_stub import Driver

from vramcast.dataset_builder.backends import Backend, BackendResult
from vramcast.dataset_builder.backends.cuda.backend import CudaBackend, CudaSettings
from vramcast.errors import UserError
from vramcast.virtual_gpu.measurement import Measurement, Status

FAKE_CHILD = Path(__file__).with_name("fake_child.py")


def fake(mode: str, estimator: Backend | None = None, **settings) -> CudaBackend:
    """Return the backend with a fake child."""
    settings = {"timeout_seconds": 20, **settings}
    return CudaBackend(CudaSettings(**settings), estimator, (sys.executable, str(FAKE_CHILD), mode))


@dataclass
class Estimates(Backend):
    """An estimator with a fixed estimate."""

    reserved_bytes: int
    name = "fixed"
    origin = "static"

    def measure(self, spec) -> BackendResult:
        return BackendResult(Measurement(status=Status.OK, reserved_bytes=self.reserved_bytes))


@dataclass
class Stubbed(Backend):
    """Forwards calls to a process with the stub."""

    backend: CudaBackend
    driver: Driver
    name = CudaBackend.name
    origin = CudaBackend.origin

    def measure(self, spec) -> BackendResult:
        return self.call("measure", spec)

    def call(self, method, *args, **environment):
        file = self.driver.folder / "call.pickle"
        file.write_bytes(pickle.dumps((self.backend, method, args)))
        result = self.driver.run("import stubbed_cuda; stubbed_cuda.answer()", str(file), **environment)
        assert result.returncode == 0, result.stderr
        answer = pickle.loads(file.read_bytes())
        if isinstance(answer, UserError):
            raise answer
        return answer


def answer() -> None:
    file = Path(sys.argv[1])
    backend, method, args = pickle.loads(file.read_bytes())
    try:
        result = getattr(backend, method)(*args)
    except UserError as error:
        result = error
    file.write_bytes(pickle.dumps(result))
