"""The choice of a GPU: visible to CUDA, allowed by the settings, free, and not locked by another measurement."""

import tempfile
from dataclasses import dataclass, field

import pytest
from filelock import FileLock

from vramcast.dataset_builder.backends.cuda.gpu_choice import (
    OtherProcesses,
    _lock_path,
    candidates,
    claimed,
    free_gpus,
    other_processes_on,
    visible_gpus,
)
from vramcast.device.nvml import Gpu, GpuMemory, GpuProcess, NoDriverError
from vramcast.errors import UserError

MIB = 2**20


def gpu(letter, index, name="A100"):
    return Gpu(f"GPU-{letter * 4}", name, index, 40 * 2**30, f"GPU-{letter * 4}")


A, B, C = gpu("a", 0), gpu("b", 1), gpu("c", 2, "T4")
X, Y = (Gpu(f"MIG-{letter * 4}", "A100 MIG 1g.5gb", 1, 5 * 2**30, B.uuid) for letter in "xy")


@dataclass
class FakeNvml:
    """The queries of the gateway, with fixed results."""

    listed: list
    processes_on: dict = field(default_factory=dict)
    used: dict = field(default_factory=dict)
    reserved_bytes: int | None = 500 * MIB
    lost: list = field(default_factory=list)

    def gpus(self):
        return self.listed

    def processes(self, gpu):
        return self.processes_on.get(gpu.uuid, [])

    def memory(self, gpu):
        return GpuMemory(gpu.total_bytes, self.used.get(gpu.uuid, 0), self.reserved_bytes)


class TestVisible:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, [A, B]),
            ("0", [A]),
            ("1,0", [B, A]),
            (" 1 , 0 ", [B, A]),
            ("GPU-bbbb", [B]),
            ("GPU-b,GPU-a", [B, A]),
            ("1,7,0", [B]),  # CUDA ignores what follows an unknown entry
            ("1,-1,0", [B]),
            ("0,0", [A]),
        ],
    )
    def test_visible_gpus_are_those_of_cuda(self, value, expected):
        environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert visible_gpus(FakeNvml([A, B]), environment) == expected

    @pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "GPU-zzzz", "7", "GPU-"])
    def test_no_visible_gpu_is_an_error(self, value):
        with pytest.raises(
            UserError, match=r"expected CUDA_VISIBLE_DEVICES to name one of \[GPU-aaaa \(A100\), GPU-bb"
        ):
            visible_gpus(FakeNvml([A, B]), {"CUDA_VISIBLE_DEVICES": value})

    def test_an_index_among_different_gpus_is_ambiguous(self):
        with pytest.raises(UserError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            visible_gpus(FakeNvml([A, B, C]), {"CUDA_VISIBLE_DEVICES": "2"})
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}
        assert visible_gpus(FakeNvml([A, B, C]), order) == [C]
        assert visible_gpus(FakeNvml([A, B, C]), {"CUDA_VISIBLE_DEVICES": "GPU-c"}) == [C]

    @pytest.mark.parametrize(
        ("value", "expected"), [("MIG-yyyy", [Y]), ("1", [X]), (B.uuid, [X]), ("MIG-y,MIG-x", [Y, X])]
    )
    def test_instances_are_named_by_uuid_or_by_their_gpu(self, value, expected):
        assert visible_gpus(FakeNvml([A, X, Y]), {"CUDA_VISIBLE_DEVICES": value}) == expected

    def test_a_machine_without_gpus_suggests_the_virtual_backend(self):
        with pytest.raises(NoDriverError, match=r"without any that responds \(GPU 0: lost\): .*backend=virtual"):
            visible_gpus(FakeNvml([], lost=["GPU 0: lost"]), {})


class TestSetting:
    @pytest.mark.parametrize(("setting", "expected"), [("auto", [A, B]), ("1", [B]), ("GPU-a", [A]), (B.uuid, [B])])
    def test_by_uuid_or_index(self, setting, expected):
        assert candidates([A, B], setting) == expected

    @pytest.mark.parametrize("setting", ["2", "GPU-zz", "GPU-", "first", ""])
    def test_a_setting_that_matches_none_or_several_is_refused(self, setting):
        with pytest.raises(UserError, match=r"expected backend.gpu to be auto or to name one of .*found none"):
            candidates([A, B], setting)

    def test_an_index_of_a_gpu_with_several_instances_is_refused(self):
        with pytest.raises(UserError, match="found 2 MIG instances for '1'"):
            candidates([A, X, Y], "1")

    def test_a_hidden_gpu_cannot_be_chosen(self):
        visible = visible_gpus(FakeNvml([A, B]), {"CUDA_VISIBLE_DEVICES": "0"})
        with pytest.raises(UserError, match="or CUDA_VISIBLE_DEVICES if that hides the GPU"):
            candidates(visible, "GPU-bbbb")


class TestOtherProcesses:
    def test_a_free_gpu(self):
        assert other_processes_on(
            FakeNvml([A], used={A.uuid: 100 * MIB}), A
        ).none  # used by a desktop without a listed process

    def test_listed_processes(self):
        others = other_processes_on(FakeNvml([A], {A.uuid: [GpuProcess(1, 5), GpuProcess(2, 6)]}), A)
        assert (others.held_bytes, others.none) == (11, False)

    def test_a_process_with_unknown_memory(self):
        others = other_processes_on(FakeNvml([A], {A.uuid: [GpuProcess(1, None)]}), A)
        assert (others.held_bytes, others.none, str(others)) == (None, False, "pid 1")

    def test_memory_without_a_listed_process(self):
        assert other_processes_on(FakeNvml([A], used={A.uuid: 300 * MIB}), A).held_bytes == 300 * MIB
        # an old driver includes its own reserve
        assert other_processes_on(FakeNvml([A], used={A.uuid: 500 * MIB}, reserved_bytes=None), A).none

    def test_no_process_list(self):
        assert other_processes_on(FakeNvml([A], {A.uuid: None}), A) == OtherProcesses((), None)


class TestFree:
    busy = FakeNvml([A, B], {A.uuid: [GpuProcess(7, 300 * MIB)]})

    def test_free_gpus_are_used(self):
        assert [gpu for gpu, _ in free_gpus(self.busy, [A, B], record=False)] == [B]

    def test_free_gpus_come_first_if_busy_ones_are_allowed(self):
        assert [gpu for gpu, _ in free_gpus(self.busy, [A, B], record=True)] == [B, A]

    def test_no_free_gpu_is_an_error(self):
        with pytest.raises(UserError, match="found pid 7 with 300 MiB on GPU-aaaa: wait"):
            free_gpus(self.busy, [A], record=False)


class TestClaim:
    @pytest.fixture(autouse=True)
    def locks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def test_two_measurements_use_two_gpus(self):
        nvml = FakeNvml([A, B])
        with claimed(nvml, [A, B], False, 1) as (first, _), claimed(nvml, [A, B], False, 1) as (second, _):
            assert {first, second} == {A, B}
        with claimed(nvml, [A, B], False, 1) as (again, _):
            assert again == A

    def test_a_busy_gpu_is_skipped_and_not_locked(self):
        with claimed(TestFree.busy, [A, B], False, 1) as (gpu, _):
            assert gpu == B
            with FileLock(_lock_path(A), timeout=0):
                pass

    def test_a_locked_gpu_is_waited_for(self):
        with (
            claimed(FakeNvml([A]), [A], False, 1),
            pytest.raises(
                UserError,
                match=r"expected one measurement at a time on \[GPU-aaaa.*found others that held it for",
            ),
            claimed(FakeNvml([A]), [A], False, 0.1),
        ):
            pass

    def test_locks_are_released_after_an_error(self):
        for _ in range(2):
            with pytest.raises(UserError, match="without other processes"), claimed(TestFree.busy, [A], False, 1):
                pass
