"""Published runs of torchtune and torchao as jobs, and small ones in their stack."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import torchao, torchtune
from benchmarks.published.job import PublishedJob
from benchmarks.published.runner import Figures, run_job
from vramcast.errors import UserError

LADDER = {
    "source": "torchtune", "url_or_repo_path": "pytorch/torchtune:README.md", "model": "Llama 3.2 3B", "n_gpus": "1",
    "seq_len": "4096 packed", "peft": "full finetune", "compile": "yes", "metric": "active (peak_memory_active)",
    "value_published": "42.9", "notes": "cumulative ladder: + Chunked Cross Entropy; command in README",
}  # fmt: skip
VIT = {
    "source": "torchao", "model": "timm vit_giant_patch14_dinov2.lvd142m", "n_gpus": "1", "micro_batch": "32",
    "dtype": "full bf16", "optimizer": "AdamW", "checkpointing": "yes", "compile": "no", "metric": "allocated",
    "value_published": "9.82", "outcome": "ok",
}  # fmt: skip
SMALL = {
    "_component_": "torchtune.models.llama2.llama2", "vocab_size": 512, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 4, "embed_dim": 128, "max_seq_len": 256,
}  # fmt: skip


def test_a_rung_of_the_ladder_is_a_packed_recipe_with_its_loss() -> None:
    job = torchtune.job_of(LADDER)
    assert isinstance(job, PublishedJob)
    assert (job.group, job.metric, job.published_bytes) == ("torchtune, compiled", "active", 42.9 * 2**30)
    assert job.parameters["packed"] and job.parameters["length"] == 4096
    assert "Chunked" in job.parameters["configuration"]["loss"]["_component_"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": "8"}, "more than one GPU"),
        ({"metric": "unknown (not stated)"}, "kind of memory"),
        ({"notes": "allocated after init; reserved 6.27"}, "before the first step"),
        ({"notes": "cumulative ladder: + something else"}, "not rebuilt"),
    ],
)
def test_records_of_torchtune_that_cannot_be_rebuilt_have_a_reason(changes: dict[str, str], reason: str) -> None:
    answer = torchtune.job_of({**LADDER, **changes})
    assert isinstance(answer, str) and reason in answer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "OOM", "value_published": ""}, "out of memory"),
        ({"metric": "unknown"}, "kind of memory"),
        ({"optimizer": "lpmm AdamW4bit rank-1"}, "another library"),
    ],
)
def test_records_of_torchao_that_cannot_be_rebuilt_have_a_reason(changes: dict[str, str], reason: str) -> None:
    answer = torchao.job_of({**VIT, **changes})
    assert isinstance(answer, str) and reason in answer


def _run(job: PublishedJob) -> Figures:
    try:
        return run_job(job, Path(__file__).parents[2] / ".venvs")[0]
    except UserError as error:
        if "make stacks" in str(error):
            pytest.skip(str(error))
        raise


def test_a_recipe_of_torchtune_runs_and_states_in_8_bits_take_less() -> None:
    figures = {}
    for name in ("bitsandbytes.optim.AdamW", "torchao.prototype.low_bit_optim.AdamW8bit"):
        configuration = {"model": SMALL, "optimizer": {"_component_": name, "lr": 1e-5}, "loss": dict(torchtune._WHOLE)}
        job = torchtune.job_of(LADDER)
        assert isinstance(job, PublishedJob)
        parameters = torchtune.recipe_parameters("full", configuration, batch_size=2, length=64)
        figures[name] = _run(replace(job, parameters=parameters))
    whole, low = figures.values()
    parameters = 2 * 512 * 128 + 2 * (4 * 128 * 128 + 3 * 128 * 512)
    assert whole.active_bytes and low.active_bytes
    assert whole.active_bytes - low.active_bytes > 1.5 * parameters
