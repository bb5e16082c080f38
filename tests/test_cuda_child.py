"""The child's side of a measurement, as far as it runs without a GPU, and the training run that it measures."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from fake_child import CONTEXT, MIB
from scripted_backend import alive, wait_until
from stubbed_cuda import FAKE_CHILD, Estimates, Stubbed

from vramcast.dataset_builder.backends.cuda.backend import CHILD, CudaBackend, CudaSettings
from vramcast.dataset_builder.backends.cuda.protocol import ChildResult, MeasureRequest, is_out_of_memory
from vramcast.dataset_builder.backends.cuda.training_run import step_sizes, training_run
from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.errors import UserError
from vramcast.jobs.families import make_spec
from vramcast.virtual_gpu.measurement import Status
from vramcast.virtual_gpu.tracing.trace import Use
from vramcast.virtual_gpu.training.setup import TrainingSetup

MLP = {"arch": "uniform", "input_features": 64, "output_features": 10, "depth": 2}
NO_GPU = not torch.cuda.is_available()


def mlp(batch=8, **training):
    return make_spec("mlp", MLP, TrainingSetup(batch_size=batch, **training))


@pytest.mark.skipif(not NO_GPU, reason="torch can use a GPU here")
def test_the_real_child_refuses_a_torch_without_cuda(driver):
    driver.stub.gpu().write()
    backend = Stubbed(CudaBackend(CudaSettings()), driver)
    with pytest.raises(UserError, match=r"expected a torch that can use this GPU, found torch .*use backend=virtual"):
        backend.measure(mlp())


def test_the_child_imports_little():
    # torch itself imports pynvml
    heavy = {
        "vramcast.device.nvml",
        "pandas",
        "hydra",
        "sklearn",
        "lightning",
        "optuna",
        "pyarrow",
        "filelock",
    }
    modules = "vramcast.dataset_builder.backends.cuda.child, vramcast.dataset_builder.backends.cuda.training_run"
    code = f"import sys, {modules}; print({heavy!r} & {{*sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


class TestOnTheCpu:
    """Both real sides, from request to row; only the values of torch.cuda are made up."""

    def measure(self, driver, mode, estimate=None):
        driver.stub.gpu().write()
        command = (sys.executable, str(FAKE_CHILD.with_name("cpu_child.py")), mode)
        estimator = None if estimate is None else Estimates(estimate)
        return Stubbed(CudaBackend(CudaSettings(timeout_seconds=100), estimator, command), driver).measure(
            mlp(last_batch_size=3, accumulate=2)
        )

    @pytest.mark.parametrize(("estimate", "held"), [(500 * MIB, True), (498 * MIB, False)])
    def test_a_run_and_its_cap(self, driver, estimate, held):
        outcome = self.measure(driver, "ok", estimate)
        measurement = outcome.measurement
        assert (measurement.status, measurement.evidence) == (Status.OK, None)
        assert (measurement.requested_bytes, measurement.allocated_bytes) == (100 * MIB, 101 * MIB)
        assert measurement.device_used_bytes == measurement.process_bytes == CONTEXT + 500 * MIB
        assert measurement.breakdown == {"context": CONTEXT, "libraries": 0, "allocator": 500 * MIB}
        assert (measurement.cap_bytes, measurement.cap_held) == (estimate, held)
        assert outcome.versions["cudnn"] == "90100"

    def test_a_crash_of_a_step(self, driver):
        measurement = self.measure(driver, "crash").measurement
        assert measurement.status is Status.CRASHED
        assert measurement.evidence == "RuntimeError: CUDA error: device-side assert triggered"
        assert measurement.reserved_bytes == 500 * MIB


class TestTrainingRun:
    @pytest.mark.parametrize("last", [None, 3])
    def test_the_steps_are_those_of_the_virtual_gpu(self, last):
        spec = mlp(last_batch_size=last)
        trace = trace_spec(spec)
        batch_bytes = [size for block, size in trace.events if size > 0 and trace.uses[block] == Use.INPUTS]
        assert [size // (4 * 64) for size in batch_bytes] == step_sizes(spec.training, epochs=2)

    @pytest.mark.parametrize(
        "training",
        [
            {"last_batch_size": 3},
            {"accumulate": 2, "optimizer": "SGD(momentum=0.9)"},
            {"autocast": "bf16", "dry_run_batch_size": 2, "dry_run_passes": 2},
            {"dtype": "bf16", "implementation": "foreach", "prefetched_batches": 2},
            {"checkpointing": True, "loss": "mse"},
        ],
    )
    def test_every_setup_trains(self, training):
        spec = mlp(**training)
        assert list(training_run(spec, epochs=1, device="cpu")) == step_sizes(spec.training, 1)

    def test_each_step_makes_its_batches_and_no_more(self, monkeypatch):
        made = []

        def count(shapes, size, dtype, device):
            made.append(size)
            return (torch.zeros(size, 64),)

        monkeypatch.setattr("vramcast.dataset_builder.backends.cuda.training_run.random_inputs", count)
        setup = {"last_batch_size": 3, "accumulate": 2, "dry_run_batch_size": 5, "prefetched_batches": 1}
        spec = mlp(**setup)
        list(training_run(spec, epochs=1, device="cpu"))
        assert made == [8, 5, *(size for size in step_sizes(spec.training, 1) for _ in range(2))]


class TestProtocol:
    def test_a_request_reads_back(self):
        request = MeasureRequest(spec=mlp(last_batch_size=3), epochs=2, cap_bytes=7)
        assert MeasureRequest.from_json(json.loads(json.dumps(request.to_json()))) == request

    def test_a_result_reads_back(self):
        result = ChildResult(status=Status.OOM, reserved_bytes=7, retries=2, evidence="e", versions={"cuda": "12"})
        assert ChildResult.from_json(json.loads(json.dumps(result.to_json()))) == result

    @pytest.mark.parametrize(
        "values",
        [
            {},
            {"status": "fine"},
            {"status": "ok", "reserved_bytes": 1.5},
            {"status": "ok", "retries": "3"},
            {"status": "ok", "surprise": 1},
            {"status": "ok", "versions": 3},
        ],
    )
    def test_a_malformed_result_is_a_value_error(self, values):
        with pytest.raises(ValueError):
            ChildResult.from_json(values)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", True),
            ("RuntimeError: CUDA error: out of memory", True),
            ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
            ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
            ("RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory", False),
            ("RuntimeError: CUDA error: device-side assert triggered", False),
        ],
    )
    def test_which_errors_are_out_of_memory(self, text, expected):
        assert is_out_of_memory(text) is expected


class TestParentEnds:
    """The child ends with its parent."""

    def test_a_parent_that_is_killed(self, driver):
        """The real child ends while it imports torch or waits for its request."""
        code = (
            "import os, subprocess, sys, time\n"
            "read, write = os.pipe()\n"
            f"child = subprocess.Popen([*{list(CHILD)!r}, str(write)], stdin=subprocess.PIPE, pass_fds=(write,),"
            " start_new_session=True)\n"
            "print(child.pid, flush=True); time.sleep(60)"
        )
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(pid)
        parent.kill()
        parent.communicate()
        assert wait_until(lambda: not alive(pid), 5)

    def test_a_parent_that_is_interrupted_ends_the_group(self, driver):
        driver.stub.gpu().write()
        code = "from stubbed_cuda import fake\nfrom job_spec import SPEC\nfake('hang').measure(SPEC)"
        (driver.folder / "job_spec.py").write_text(
            "from vramcast.jobs.families import make_spec\n"
            "from vramcast.virtual_gpu.training.setup import TrainingSetup\n"
            f"SPEC = make_spec('mlp', {MLP!r}, TrainingSetup(batch_size=8))\n"
        )
        path = os.pathsep.join([str(FAKE_CHILD.parent), str(driver.folder)])
        parent = subprocess.Popen(
            [sys.executable, "-c", code], env=driver.environment(PYTHONPATH=path), stderr=subprocess.PIPE, text=True
        )
        state = driver.stub.path
        assert wait_until(lambda: "1048576000" in state.read_text(), 10)
        pid = int(state.read_text().split()[-1])
        assert alive(pid)
        parent.send_signal(signal.SIGINT)
        _, errors = parent.communicate(timeout=10)
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert wait_until(lambda: not alive(pid), 5)
