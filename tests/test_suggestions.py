"""Changes that make a job fit: tried in the order of their cost, and listed with those that fit first."""

import pytest

from vramcast.commands.classify.page import Page, render_page
from vramcast.errors import UserError
from vramcast.models.advice.suggestions import suggestions
from vramcast.models.answer import FITS, Answer, Bucket
from vramcast.virtual_gpu.training.setup import TrainingSetup

PARAMETERS = 100.0


def answer_of(need, capacity, batch=4, **more):
    bucket = Bucket(index=0, lower_mib=0, upper_mib=None, probability=1)
    return Answer(
        target="hf:made", batch_size=batch, device="a100_40gb", bucket=bucket, estimate_mib=need, safe_mib=need,
        allocated_mib=1, reserved_mib=2, capacity_mib=capacity, oom_probability=0, risk=0.01, out_of_distribution=False,
        checkpoint="made", profile="made", seconds=1, **more,
    )  # fmt: skip


class Job:
    """A job whose memory is a formula of its options."""

    def __init__(self, capacity, target="hf:made", peft=True, **start):
        self.target = target
        self.capacity, self.peft = capacity, peft
        self.start = {"batch_size": 4, "optimizer": "AdamW", "dtype": "bf16", **start}
        self.asked = []

    def answer(self, device, **options):
        values = {**self.start, **options}
        self.asked.append(options)
        if values.get("adapter") and not self.peft:
            raise UserError("expected peft: pip install 'vramcast[finetuning]'")
        base = PARAMETERS * (2 if values["dtype"] == "fp32" else 1) / (4 if values.get("quantize") else 1)
        states = 0.0 if values.get("adapter") else base * (2 if "8bit" in values["optimizer"] else 3)
        activations = values["batch_size"] * (10.0 if values.get("checkpointing") else 50.0)
        ranks = 1 if not values.get("parallel") else int(values["parallel"].split("world_size=")[1].rstrip(")"))
        held = {"parameters": base, "optimizer_state": states, "activations": activations}
        need = (base + states) / ranks + activations
        return answer_of(need, self.capacity, values["batch_size"], breakdown_mib=held)

    def changes(self, largest=None, devices=()):
        answer = self.answer("a100_40gb")
        self.asked.clear()
        return suggestions(self, answer, TrainingSetup(**self.start), largest, devices)


def test_the_least_costly_change_that_fits_comes_first():
    items, notes = Job(capacity=450).changes()
    assert items[0].answer.verdict == FITS
    assert items[0].change == "activation checkpointing (--checkpointing)"
    assert notes == ()
    verdicts = [item.answer.verdict == FITS for item in items]
    assert verdicts == sorted(verdicts, reverse=True)


def test_combinations_are_tried_only_if_no_single_change_fits():
    job = Job(capacity=350)
    items, _ = job.changes()
    assert items[0].change == (
        "activation checkpointing + optimizer state in 8 bits (--checkpointing --optimizer adamw8bit)"
    )
    assert not any("adapter" in options for options in job.asked)


def test_lora_comes_after_all_changes_of_the_same_training():
    job = Job(capacity=150)
    items, _ = job.changes()
    assert items[0].change == (
        "LoRA on all linear layers + activation checkpointing (--lora r=16,targets=all-linear --checkpointing)"
    )
    assert not any("quantize" in options for options in job.asked)  # LoRA alone was enough


def test_a_quantised_base_and_smaller_parts_come_last():
    items, _ = Job(capacity=60).changes()
    assert items[0].change.startswith(
        "LoRA on all linear layers + activation checkpointing + base in 4 bits + the same"
    )
    assert "--quantize nf4 --batch-size 1 --accumulate 4" in items[0].change


def test_an_adapter_is_combined_with_a_quantised_base():
    items, _ = Job(capacity=70, adapter="lora").changes()
    assert items[0].change == "activation checkpointing + base in 4 bits (--checkpointing --quantize nf4)"


def test_several_of_the_same_gpus():
    items, _ = Job(capacity=250).changes()
    sharded = [item for item in items if "FSDP2" in item.change]
    assert [item.answer.verdict for item in sharded] == [FITS]
    assert "--parallel fsdp2 --world-size 2 --checkpointing" in sharded[0].change


def test_without_peft_a_note_says_what_to_install():
    items, notes = Job(capacity=150, peft=False).changes()
    assert not any("LoRA" in item.change for item in items)
    assert len(notes) == 1 and "vramcast[finetuning]" in notes[0]


@pytest.mark.parametrize("target", ["timm:resnet50", "net.py:make"])
def test_other_networks_get_no_adapter(target):
    job = Job(capacity=150, target=target)
    job.changes()
    assert not any("adapter" in options or "parallel" in options for options in job.asked)


def test_the_page_separates_what_is_enough_from_what_is_not():
    job = Job(capacity=450)
    items, _ = job.changes()
    text = render_page(Page(job.answer("a100_40gb"), "made", suggestions=items))
    enough, rest = text.index("Changes that make it fit"), text.index("Not enough")
    assert enough < text.index("activation checkpointing") < rest
