"""Which GPU is measured on: what CUDA would show, what was asked for, who is there, who measures already."""

import tempfile
from dataclasses import dataclass, field

import pytest
from filelock import FileLock

from vramcast.dataset_builder.measure.cuda.choice import (
    Others,
    _lock_path,
    candidates,
    claimed,
    free_gpus,
    others_on,
    visible_gpus,
)
from vramcast.dataset_builder.measure.nvml import Gpu, GpuProcess, Memory, NoDriverError
from vramcast.errors import UserError

MIB = 2**20


def card(letter, index, name="A100"):
    return Gpu(f"GPU-{letter * 4}", name, index, 40 * 2**30, f"GPU-{letter * 4}")


A, B, C = card("a", 0), card("b", 1), card("c", 2, "T4")
X, Y = (Gpu(f"MIG-{letter * 4}", "A100 MIG 1g.5gb", 1, 5 * 2**30, B.uuid) for letter in "xy")


@dataclass
class Cards:
    """What the gateway would say."""

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
        return Memory(gpu.total_bytes, self.used.get(gpu.uuid, 0), self.reserved_bytes)


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
            ("1,7,0", [B]),  # what follows an entry that names nothing does not count
            ("1,-1,0", [B]),
            ("0,0", [A]),
        ],
    )
    def test_it_is_what_cuda_would_show(self, value, expected):
        environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert visible_gpus(Cards([A, B]), environment) == expected

    @pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "GPU-zzzz", "7", "GPU-"])
    def test_none_is_told(self, value):
        with pytest.raises(
            UserError, match=r"expected CUDA_VISIBLE_DEVICES to name one of \[GPU-aaaa \(A100\), GPU-bb"
        ):
            visible_gpus(Cards([A, B]), {"CUDA_VISIBLE_DEVICES": value})

    def test_an_index_among_different_cards_is_ambiguous(self):
        with pytest.raises(UserError, match="set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            visible_gpus(Cards([A, B, C]), {"CUDA_VISIBLE_DEVICES": "2"})
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "2"}
        assert visible_gpus(Cards([A, B, C]), order) == [C]
        assert visible_gpus(Cards([A, B, C]), {"CUDA_VISIBLE_DEVICES": "GPU-c"}) == [C]

    @pytest.mark.parametrize(
        ("value", "expected"), [("MIG-yyyy", [Y]), ("1", [X]), (B.uuid, [X]), ("MIG-y,MIG-x", [Y, X])]
    )
    def test_instances_are_named_by_uuid_or_by_their_card(self, value, expected):
        assert visible_gpus(Cards([A, X, Y]), {"CUDA_VISIBLE_DEVICES": value}) == expected

    def test_a_machine_without_cards_names_the_virtual_backend(self):
        with pytest.raises(NoDriverError, match=r"none that answers \(card 0: lost\): .*backend=virtual"):
            visible_gpus(Cards([], lost=["card 0: lost"]), {})


class TestAsked:
    @pytest.mark.parametrize(("asked", "expected"), [("auto", [A, B]), ("1", [B]), ("GPU-a", [A]), (B.uuid, [B])])
    def test_by_uuid_or_index(self, asked, expected):
        assert candidates([A, B], asked) == expected

    @pytest.mark.parametrize("asked", ["2", "GPU-zz", "GPU-", "first", ""])
    def test_what_names_none_or_several_is_refused(self, asked):
        with pytest.raises(UserError, match=r"expected backend.gpu to be auto or to name one of .*found none"):
            candidates([A, B], asked)

    def test_an_index_of_a_card_in_instances_is_not_enough(self):
        with pytest.raises(UserError, match="found 2 MIG instances for '1'"):
            candidates([A, X, Y], "1")

    def test_what_is_hidden_cannot_be_asked_for(self):
        visible = visible_gpus(Cards([A, B]), {"CUDA_VISIBLE_DEVICES": "0"})
        with pytest.raises(UserError, match="or CUDA_VISIBLE_DEVICES if that hides the GPU"):
            candidates(visible, "GPU-bbbb")


class TestOthers:
    def test_nobody(self):
        assert others_on(Cards([A], used={A.uuid: 100 * MIB}), A).nobody  # a card in a desktop, with no process named

    def test_named_processes(self):
        found = others_on(Cards([A], {A.uuid: [GpuProcess(1, 5), GpuProcess(2, 6)]}), A)
        assert (found.held_bytes, found.nobody) == (11, False)

    def test_a_process_whose_memory_is_not_told(self):
        found = others_on(Cards([A], {A.uuid: [GpuProcess(1, None)]}), A)
        assert (found.held_bytes, found.nobody, str(found)) == (None, False, "pid 1")

    def test_memory_that_no_named_process_holds(self):
        assert others_on(Cards([A], used={A.uuid: 300 * MIB}), A).held_bytes == 300 * MIB
        # an old driver counts what it reserves itself: that tells of nobody
        assert others_on(Cards([A], used={A.uuid: 500 * MIB}, reserved_bytes=None), A).nobody

    def test_no_list_at_all(self):
        assert others_on(Cards([A], {A.uuid: None}), A) == Others((), None)


class TestFree:
    busy = Cards([A, B], {A.uuid: [GpuProcess(7, 300 * MIB)]})

    def test_free_cards_are_taken(self):
        assert [gpu for gpu, _ in free_gpus(self.busy, [A, B], record=False)] == [B]

    def test_free_cards_come_first_where_all_are_taken(self):
        assert [gpu for gpu, _ in free_gpus(self.busy, [A, B], record=True)] == [B, A]

    def test_none_is_refused(self):
        with pytest.raises(UserError, match="found pid 7 with 300 MiB on GPU-aaaa: wait"):
            free_gpus(self.busy, [A], record=False)


class TestClaim:
    @pytest.fixture(autouse=True)
    def locks(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def test_two_measurements_take_two_cards(self):
        cards = Cards([A, B])
        with claimed(cards, [A, B], False, 1) as (first, _), claimed(cards, [A, B], False, 1) as (second, _):
            assert {first, second} == {A, B}
        with claimed(cards, [A, B], False, 1) as (again, _):
            assert again == A

    def test_a_busy_card_is_passed_over_and_left_to_others(self):
        with claimed(TestFree.busy, [A, B], False, 1) as (gpu, _):
            assert gpu == B
            with FileLock(_lock_path(A), timeout=0):
                pass

    def test_a_card_that_is_measured_on_is_waited_for(self):
        with (
            claimed(Cards([A]), [A], False, 1),
            pytest.raises(
                UserError, match=r"expected one measurement at a time on \[GPU-aaaa.*found others there for 0.1 s"
            ),
            claimed(Cards([A]), [A], False, 0.1),
        ):
            pass

    def test_all_is_free_again_after_a_refusal(self):
        for _ in range(2):
            with pytest.raises(UserError, match="nobody else"), claimed(TestFree.busy, [A], False, 1):
                pass
