"""Published rows on several GPUs: parsing, left-out rows, and a small rank of each network."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import fms_ranks, litgpt_ranks, torchtitan
from benchmarks.published.__main__ import main
from benchmarks.published.evaluation import _question
from benchmarks.published.job import RANK_SCRIPT, PublishedJob
from benchmarks.published.ranks.client import rank_files
from benchmarks.published.runner import profile_of, simulate_job
from benchmarks.published.tables import read_published
from vramcast.errors import UserError
from vramcast.jobs import checkpointing
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.training.setup import TrainingSetup

TITAN = {
    "source": "torchtitan", "model": "Llama 3.1 8B", "gpu": "H100 96GB (90.5 GiB visible)", "n_gpus": "8",
    "parallelism": "FSDP2 8", "micro_batch": "2", "seq_len": "8192", "dtype": "params bf16, reduce fp32",
    "checkpointing": "selective, per-op SAC", "compile": "no", "framework_versions": "torch nightly 2024-12",
    "metric": "reserved", "value_gib": "80", "notes": "", "outcome": "ok",
}  # fmt: skip
FMS = {
    "source": "fms-acceleration benchmarks", "model": "mistralai/Mistral-7B-v0.1", "n_gpus": "2", "micro_batch": "4",
    "task": "full finetune framework=none alpaca", "seq_len": "[4096] packed=[True]; logged tokens/sample=2049",
    "dtype": "torch_dtype=bfloat16 bf16_autocast=no fp16_autocast=no", "peft": "",
    "framework_versions": "peft==0.12.0; transformers==4.44.2", "metric": "allocated (rank 0)", "value_gib": "40",
    "notes": "runs=1; peak_alloc_B=42949672960.0", "outcome": "ok",
}  # fmt: skip
LORA = "LoRA r=16.0 alpha=16.0 dropout=0.1 targets=q_proj v_proj; framework_config=none"
LITGPT = {
    "source": "litgpt resource-tables", "model": "phi-1.5 1.3B", "n_gpus": "2", "micro_batch": "1",
    "seq_len": "900 (longest sample)", "value_published": "5.00 GB", "outcome": "ok",
}  # fmt: skip
SMALL = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 512}


def _job(job: PublishedJob | str) -> PublishedJob:
    assert isinstance(job, PublishedJob), job
    assert job.script == RANK_SCRIPT and json.dumps(job.parameters)
    return job


def _launched(**change: str) -> PublishedJob:
    job = fms_ranks.job_of({**FMS, **change})
    assert isinstance(job, PublishedJob), job
    assert job.script == "sft_trainer" and json.dumps(job.parameters)
    return job


def _parallelism(job: PublishedJob) -> Any:
    return TrainingSetup(**job.parameters["training"]).parallelism


def test_a_row_of_torchtitan_is_a_rank_with_the_memory_of_its_gpu() -> None:
    job = _job(torchtitan.job_of(TITAN))
    assert (job.group, job.metric, job.published_bytes, job.stack) == ("torchtitan", "reserved", 80 * 2**30, None)
    parallelism = _parallelism(job)
    assert (parallelism.strategy, parallelism.world_size, parallelism.reduce_dtype) == ("fsdp2", 8, "fp32")
    assert profile_of(job).available_bytes == int(90.5 * 1024) * MIB
    active = _job(torchtitan.job_of({**TITAN, "metric": "active (allocator active_bytes peak)"}))
    assert active.metric == "active" and active.key == job.key


def test_the_strategy_of_torchtitan_follows_its_row() -> None:
    first = _job(torchtitan.job_of({**TITAN, "parallelism": "FSDP1 8"}))
    whole = _job(torchtitan.job_of({**TITAN, "parallelism": "FSDP2 8, reshard_after_forward=never"}))
    assert _parallelism(first).strategy == "fsdp1"
    assert _parallelism(whole).shard_after_forward is False


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compile": "?"}, "not stated"),
        ({"notes": "float8 all-gather"}, "all-gather"),
        ({"dtype": "float8nocompile prototype eager"}, "float8"),
        ({"framework_versions": "a nightly"}, "date"),
        ({"parallelism": "FSDP 32 x TP 8"}, "tensor"),
        ({"value_gib": ""}, "out of memory"),
        ({"notes": "step 1 of 10"}, "first step"),
        ({"notes": "SDPA; n_gpus not stated"}, "number of GPUs"),
        ({"model": "Mamba 3B"}, "Mamba 3B"),
        ({"gpu": "MI300X"}, "MI300X"),
    ],
)
def test_rows_of_torchtitan_that_cannot_be_rebuilt_are_left_out(change: dict[str, str], reason: str) -> None:
    answer = torchtitan.job_of({**TITAN, **change})
    assert isinstance(answer, str) and reason in answer


@pytest.mark.parametrize(
    ("versions", "expandable", "compiled_loss"),
    [
        ("torch nightly Mar 2024", False, False),
        ("torch 1963fc8 (2024-12-23)", True, False),
        ("mid-2025 torchtitan main", True, True),
    ],
)
def test_compiled_rows_have_the_settings_of_their_date(versions: str, expandable: bool, compiled_loss: bool) -> None:
    job = _job(torchtitan.job_of({**TITAN, "compile": "per TransformerBlock", "framework_versions": versions}))
    training = TrainingSetup(**job.parameters["training"])
    assert (training.compile, training.compile_loss) == ("blocks", compiled_loss)
    assert job.parameters["expandable_segments"] is expandable
    assert job.group == "torchtitan, compiled"
    assert any("allocator and loss are those" in text for text in job.assumptions)


def test_a_row_of_fms_on_two_gpus_is_launched_in_the_stack_of_its_time() -> None:
    job = _launched(peft=LORA)
    assert (job.group, job.stack, job.metric) == ("several GPUs", "transformers-4.45", "allocated")
    assert (job.parameters["length"], job.parameters["tokens"], job.parameters["ranks"]) == (4096, 32001, 2)
    assert job.parameters["lora"]["target_modules"] == ["q_proj", "v_proj"]
    assert job.launcher[:3] == ("-m", "accelerate.commands.launch", "--use_fsdp")
    assert job.launcher[job.launcher.index("--num_processes") + 1] == "2"
    assert replace(job, launcher=()).key != job.key


def test_a_table_that_lost_its_column_of_autocast_trained_under_it() -> None:
    versions = f"{FMS['framework_versions']}; csv date"
    lost, whole = (_launched(framework_versions=f"{versions} {date}") for date in ("2024-10-01", "2024-10-18"))
    assert (lost.parameters["autocast"], whole.parameters["autocast"]) == ("bf16", None)


def test_padded_rows_of_fms_have_a_group_of_their_own() -> None:
    job = _launched(seq_len="<= [4096]; logged tokens/sample=111")
    assert (job.group, job.parameters["length"]) == ("several GPUs, padded", 222)
    assert any("lower bounds" in text for text in job.assumptions)
    assert job.guesses_lengths and not _launched().guesses_lengths


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"task": "LoRA framework=accelerated-peft-bnb alpaca"}, "accelerated-peft-bnb"),
        ({"model": "mistralai/Mixtral-8x7B-Instruct-v0.1"}, "mixtral-8x7b"),
        ({"notes": "peak_alloc_B=0"}, "failed"),
    ],
)
def test_rows_of_fms_that_cannot_be_rebuilt_are_left_out(change: dict[str, str], reason: str) -> None:
    answer = fms_ranks.job_of({**FMS, **change})
    assert isinstance(answer, str) and reason in answer


def test_a_row_of_litgpt_has_its_longest_batch_first() -> None:
    job = _job(litgpt_ranks.job_of(LITGPT))
    assert (job.parameters["length"], job.parameters["later_length"], job.published_bytes) == (900, 128, 5e9)
    assert "several GPUs" in job.group and _parallelism(job).world_size == 2
    for change, reason in (({"outcome": "OOM"}, "out of memory"), ({"model": "Falcon 40B"}, "Falcon 40B")):
        answer = litgpt_ranks.job_of({**LITGPT, **change})
        assert isinstance(answer, str) and reason in answer


def test_tables_read_rows_on_several_gpus_by_their_own_importer(tmp_path: Path) -> None:
    table = read_published(_written(tmp_path / "fms.csv", FMS, {**FMS, "metric": "smi (peak)"}))
    assert [(job.group, job.metric) for job in table.jobs] == [("several GPUs", "allocated"), ("several GPUs", "smi")]


def test_a_table_of_torchtitan_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**SMALL, "kv_heads": 2, "hidden": 128}
    monkeypatch.setitem(torchtitan._NETWORKS, "Llama 3", sizes)
    record = {**TITAN, "seq_len": "64", "value_gib": "0.05"}
    path = _written(tmp_path / "titan.csv", record, {**record, "metric": "active"}, {**record, "compile": "yes"})
    assert main(["--data", str(path), "--cache", str(tmp_path), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [(item["metric"], item["jobs"]) for item in figures["groups"]] == [
        ("active", 1), ("reserved", 1), ("reserved", 1),
    ]  # fmt: skip
    assert (figures["skipped"], figures["safe_jobs"], figures["failed"]) == ({}, 2, {})
    assert (
        len(list((tmp_path / "published").glob("*.json"))) == 2
    )  # both figures of the eager job are of one simulation


def test_a_rank_of_litgpt_shards_its_frozen_base() -> None:
    figures = []
    for size in (2, 4):
        job = _job(litgpt_ranks.job_of({**LITGPT, "n_gpus": str(size)}))
        arguments = {**job.parameters["arguments"], **SMALL, "width": 512}
        small = {**job.parameters, "arguments": arguments, "training": {**job.parameters["training"], "accumulate": 1}}
        result, simulation = simulate_job(replace(job, parameters=small))
        assert simulation is not None and simulation.training.parallelism is not None
        figures.append(result.allocated_bytes)
    assert figures[0] > figures[1] > 0
    assert simulation is not None
    stated, guessed = (
        _question(replace(job, guesses_lengths=guess), simulation, profile_of(job)) for guess in (False, True)
    )
    assert guessed.example.assumed and not stated.example.assumed, "lengths that are not published widen the bound"


GRANITE = {
    "model_type": "granite", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
}  # fmt: skip
BIGCODE = {
    "model_type": "gpt_bigcode", "vocab_size": 1024, "n_positions": 64, "n_embd": 128, "n_layer": 8, "n_head": 4,
    "n_inner": 512, "multi_query": True,
}  # fmt: skip
GRANITE_BLOCK = 4 * 128**2 + 3 * 128 * 512 + 2 * 128
# queries of 128 and one head of keys and values of 32 each; all layers have biases
BIGCODE_BLOCK = (128 * 192 + 192) + (128**2 + 128) + (2 * 128 * 512 + 512 + 128) + 4 * 128


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [(GRANITE, 1024 * 128 + 128 + 8 * GRANITE_BLOCK), (BIGCODE, (1024 + 64) * 128 + 2 * 128 + 8 * BIGCODE_BLOCK)],
    ids=["granite", "gpt_bigcode"],
)
def test_a_rank_under_mixed_precision_holds_half_of_fp32_states(sizes: dict[str, Any], parameters: int) -> None:
    # weights, gradients, two states and one temporary of AdamW, 4 bytes each; tied embeddings count once
    job = _launched(dtype="torch_dtype=bfloat16 bf16_autocast=True fp16_autocast=no")
    small = {**job.parameters, "network": sizes, "tokens": 1024, "length": 64, "batch_size": 1}
    try:
        figures, simulation = simulate_job(replace(job, parameters=small), Path(__file__).parents[2] / ".venvs")
    except UserError as error:
        if "make stacks" in str(error):
            pytest.skip(str(error))
        raise
    workspaces = 2 * 8_519_680
    assert figures.allocated_bytes == pytest.approx(20 * parameters / 2 + workspaces, rel=0.01)
    assert simulation is not None


def test_results_of_ranks_follow_the_checkpointing_that_they_share_with_jobs() -> None:
    assert Path(checkpointing.__file__).resolve() in rank_files()  # a stored result is of these files


def test_an_error_of_a_rank_is_named() -> None:
    job = _job(litgpt_ranks.job_of(LITGPT))
    broken = replace(job, parameters={**job.parameters, "network": "unknown"})
    with pytest.raises(UserError, match=r"expected figures of phi-1.5.*unknown"):
        simulate_job(broken)


def _written(path: Path, *records: dict[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, sorted({name for record in records for name in record}))
        writer.writeheader()
        writer.writerows(records)
    return path
