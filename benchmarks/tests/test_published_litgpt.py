"""litgpt's published rows: parsing, and one small job of its own fine-tuning."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import litgpt
from benchmarks.published.job import PublishedJob
from benchmarks.published.runner import run_job
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

TABLE = {
    "source": "litgpt resource-tables", "model": "phi-1.5 1.3B", "gpu": "A100-SXM4-40GB", "n_gpus": "1",
    "micro_batch": "2", "seq_len": "900 (longest sample)", "dtype": "bf16-true (weights bf16)", "outcome": "ok",
    "peft": "QLoRA r=8 alpha=16 dropout=0.05 targets=q,v base=bnb.nf4-dq; trainable=1", "value_published": "5.00 GB",
}  # fmt: skip
HUB = {
    **TABLE, "source": "litgpt config_hub", "model": "gemma-2b", "gpu": "A10G", "seq_len": "<= 512 (cap)",
    "peft": "LoRA r=16 alpha=16 dropout=0.1 targets=query,key,value,projection,mlp,head",
}  # fmt: skip


def _job(record: dict[str, str]) -> PublishedJob:
    job = litgpt.job_of(record)
    assert isinstance(job, PublishedJob), job
    return job


def test_a_row_of_the_resource_tables_has_its_longest_sample_first() -> None:
    job = _job(TABLE)
    assert job.parameters["lengths"] == [900, 128, 128, 128] and job.parameters["cap"] is None
    assert job.parameters["quantize"] == "bnb.nf4-dq" and job.parameters["keeps_inputs"]
    options = job.parameters["options"]
    assert [name for name, value in options.items() if value is True] == ["lora_query", "lora_value"]
    assert (job.stack, job.device, job.published_bytes) == ("litgpt-0.2", "a100_40gb", 5e9)
    assert len(job.assumptions) == 1


def test_a_row_of_the_config_hub_has_batches_of_its_cap() -> None:
    job = _job(HUB)
    assert job.parameters["lengths"] == [512] * 4 and job.parameters["cap"] == 512
    assert job.parameters["quantize"] is None and not job.parameters["keeps_inputs"]
    assert not job.parameters["first_generation"] and all(
        job.parameters["options"][f"lora_{name}"] for name in ("query", "mlp", "head")
    )
    assert (job.stack, job.group) == ("litgpt-0.4", "litgpt config hub")


@pytest.mark.parametrize(
    ("peft", "method"),
    [("LLaMA-Adapter v1; trainable=1", "adapter"), ("QLLaMA-Adapter v2 base=bnb.nf4", "adapter_v2"), ("", "full")],
)
def test_methods_are_litgpts_own_scripts(peft: str, method: str) -> None:
    assert _job({**TABLE, "peft": peft}).parameters["method"] == method


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "4"}, "more than one GPU"),
        ({"outcome": "OOM"}, "out of memory"),
        ({"dtype": ""}, "not stated"),
        ({"model": "Falcon 40B"}, "Falcon 40B"),
    ],
)
def test_rows_that_cannot_be_rebuilt_are_left_out_with_a_reason(change: dict[str, str], reason: str) -> None:
    answer = litgpt.job_of({**TABLE, **change})
    assert isinstance(answer, str) and reason in answer


def test_a_row_without_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank"):
        litgpt.job_of({**TABLE, "peft": "LoRA r=None targets="})


def test_litgpt_trains_a_quantised_base_with_a_paged_optimizer() -> None:
    job = _job(TABLE)
    rank = {**job.parameters["options"], "lora_r": 512}  # tensors of more than 100,000 elements are paged
    small = {**job.parameters, "network": "pythia-14m", "lengths": [64, 32, 32, 32], "options": rank}
    try:
        figures, report = run_job(replace(job, parameters=small), Path(__file__).parents[2] / ".venvs")
    except UserError as error:
        if "make stacks" in str(error):
            pytest.skip(str(error))
        raise
    assert report is not None and any("paged" in text for text in report.assumptions)
    assert 14 * MIB < figures.allocated_bytes < 200 * MIB
