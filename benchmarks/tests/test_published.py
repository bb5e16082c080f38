"""Published fine-tuning runs: parsing, repeated runs, configurations, stacks, and one small job of each script."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import fms, liger, peft_comparison, stacks
from benchmarks.published.__main__ import main
from benchmarks.published.evaluation import (
    PublishedComparison,
    PublishedStore,
    Result,
    _safe_figures,
    evaluate_published,
)
from benchmarks.published.job import PublishedJob, combined
from benchmarks.published.networks import network
from benchmarks.published.runner import Figures, run_job
from benchmarks.published.tables import read_published
from vramcast.errors import UserError
from vramcast.virtual_gpu.allocator.sizes import MIB

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
FMS = {
    "source": "fms-acceleration benchmarks",
    "model": "mistralai/Mistral-7B-v0.1",
    "task": "LoRA/QLoRA SFT framework=baseline-peft-bnb alpaca-cleaned",
    "n_gpus": "1",
    "micro_batch": "4",
    "seq_len": "[4096] packed=[True]; logged tokens/sample=4097",
    "dtype": "torch_dtype=float16 bf16_autocast=no fp16_autocast=True",
    "peft": "LoRA r=16.0 alpha=16.0 dropout=0.1 targets=q_proj k_proj; framework_config=baseline-peft-bnb",
    "framework_versions": "peft==0.12.0; transformers==4.43.3; trl==0.9.6",
    "metric": "allocated (HF Trainer max_memory_allocated, rank 0)",
    "value_gib": "20",
    "notes": "runs=1; peak_alloc_B=21474836480.0; alloc_B=1.0",
}
LIGER = {
    "source": "Liger-Kernel kernel benchmarks",
    "model": "cross_entropy [huggingface]",
    "task": "full V=4096",
    "gpu": "NVIDIA A100-SXM4-80GB",
    "framework_versions": "liger 0.2.1; run 2024-09-03; torch not stated",
    "metric": "allocated",
    "value_gib": "1.2501",
    "value_published": "1280.1259765625",
    "notes": '{"B": 8, "T": 2048}',
}


def test_an_fms_record_becomes_a_job() -> None:
    job = fms.job_of(FMS)
    assert isinstance(job, PublishedJob)
    assert (job.group, job.stack, job.metric, job.published_bytes) == (
        "dense",
        "transformers-4.45",
        "allocated",
        20 * 2**30,
    )
    assert job.parameters["lora"] == {
        "r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "k_proj"],
    }
    assert job.parameters["quantisation"]["bnb_4bit_quant_type"] == "nf4"
    assert (job.parameters["dtype"], job.parameters["autocast"]) == ("fp16", "fp16")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n_gpus": "2"}, "more than one GPU"),
        ({"task": "full finetune framework=foak-fast-kernels alpaca"}, "foak-fast-kernels"),
        ({"seq_len": "<= [4096], packing False"}, "lengths"),
        ({"notes": "peak_alloc_B=nan"}, "failed"),
        ({"notes": "peak_alloc_B=0; alloc_B=0"}, "failed"),
        ({"model": "somebody/unknown"}, "somebody/unknown"),
    ],
)
def test_records_that_cannot_be_rebuilt_are_left_out_with_a_reason(change: dict[str, str], reason: str) -> None:
    job = fms.job_of({**FMS, **change})
    assert isinstance(job, str) and reason in job


def test_stacks_follow_the_release_of_a_row() -> None:
    for release, stack in (("4.39.3", "4.39"), ("4.45.2", "4.45"), ("4.48.1", "4.48")):
        job = fms.job_of({**FMS, "framework_versions": f"transformers=={release}; trl==0.9"})
        assert isinstance(job, PublishedJob) and job.stack == f"transformers-{stack}"


def test_some_gptq_checkpoints_have_no_groups() -> None:
    task = "LoRA framework=accelerated-peft-autogptq alpaca"
    for model, size in (("TheBloke/Mistral-7B-v0.1-GPTQ", 128), ("TheBloke/Llama-2-70B-GPTQ", None)):
        job = fms.job_of({**FMS, "model": model, "task": task})
        assert isinstance(job, PublishedJob) and job.parameters["quantisation"] == {"bits": 4, "group_size": size}


def test_repeated_runs_are_scored_once_by_their_median() -> None:
    job = fms.job_of(FMS)
    assert isinstance(job, PublishedJob)
    others = [replace(job, published_bytes=value) for value in (1.0, 3.0, 10.0)]
    (single,) = combined(others)
    assert (single.published_bytes, single.runs) == (3.0, 3)
    assert len(combined([job, replace(job, metric="smi")])) == 2


def test_kernels_of_liger_are_a_group_of_their_own():
    record = {**LIGER, "model": "cross_entropy [liger_triton]", "gpu": "NVIDIA B200",
              "framework_versions": "liger 0.8.0; run 2026-07-05; torch not stated"}  # fmt: skip
    job = liger.job_of(record)
    assert (job.group, job.script, job.stack) == ("Liger's operators", "liger_operators", "liger-0.8")
    assert liger.job_of({**record, "model": "cross_entropy [liger_cutile]"}) == "kernels of liger"


def test_an_operator_is_simulated_exactly() -> None:
    job = liger.job_of(LIGER)
    assert isinstance(job, PublishedJob)
    figures, report = run_job(job)
    assert report is None
    assert figures.allocated_bytes == pytest.approx(1280.1259765625 * MIB, rel=1e-5)


def test_an_adapter_keeps_its_configuration() -> None:
    record = {
        "source": "PEFT method_comparison/MetaMathQA", "task": "lora/rank32", "metric": "reserved",
        "peft": 'LORA: {"r": 32, "use_dora": true}; trainable=9', "optimizer": 'AdamW {"lr": 0.0001}',
        "dtype": "bfloat16 use_amp=False autocast_adapter_dtype=True", "seq_len": "<= 768 (dynamic padding)",
        "checkpointing": "no", "micro_batch": "4", "value_published": "20321402880",
        "framework_versions": "torch 2.13.0+cu130; transformers 5.13.1; peft 0.19.2.dev0",
    }  # fmt: skip
    job = peft_comparison.job_of(record)
    assert isinstance(job, PublishedJob) and (job.stack, job.parameters["evaluates_base"]) == ("peft-0.20", True)
    older = peft_comparison.job_of({**record, "framework_versions": "torch 2.9.0; transformers 4.57.1; peft 0.18.1"})
    assert isinstance(older, PublishedJob) and (older.stack, older.parameters["evaluates_base"]) == ("peft-0.18", False)
    assert job.parameters["adapter"] == {"kind": "LORA", "config": {"r": 32, "use_dora": True}, "autocast": True}
    assert (job.parameters["length"], job.parameters["optimizer"]["options"]) == (768, {"lr": 0.0001})
    assert job.assumptions


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mistral-7b", 7_241_732_096),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("santacoder", 1_124_886_528),
    ],
)
def test_configurations_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = dict(network(name))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        subject = transformers.AutoModelForCausalLM.from_config(config)
    assert subject.num_parameters() == parameters


def test_releases_are_pinned() -> None:
    assert stacks.names()[0] == stacks.SHARED
    for name in stacks.names():
        assert all("==" in line for line in stacks.releases(name)), name


def test_a_missing_stack_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"transformers-4.45.*make stacks"):
        stacks.interpreter("transformers-4.45", tmp_path)


def _write(path: Path, *records: dict[str, str]) -> Path:
    columns = sorted({name for record in records for name in record})
    quoted = [[json.dumps(record.get(name, "")).replace('\\"', '""') for name in columns] for record in records]
    path.write_text("\n".join([",".join(columns), *(",".join(row) for row in quoted)]) + "\n")
    return path


def test_a_table_is_evaluated_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "table.csv", LIGER, LIGER, {**LIGER, "model": "cross_entropy [liger]"})
    words = ["--data", str(path), "--cache", str(tmp_path), "--json"]
    assert main(words) == 0
    figures = json.loads(capsys.readouterr().out)
    (group,) = figures["groups"]
    assert (group["metric"], group["jobs"], group["rows"]) == ("allocated", 1, 2)
    assert group["median"] < 1e-5 and figures["skipped"] == {"kernels of liger": 1}
    (stored,) = (tmp_path / "published").glob("*.json")
    stored.write_text(json.dumps({"figures": {"allocated_bytes": 0, "reserved_bytes": 0}, "simulation": None}))
    again = evaluate_published(read_published(path), PublishedStore(tmp_path, stacks.ROOT))
    assert again["groups"][0]["median"] == 1.0
    stored.write_text('{"figures": {"allocated')
    assert main(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == figures and f"{stored} is damaged: it is made again" in printed.err


@pytest.mark.parametrize("figure", ["inf", "nan", "-1", "0"])
def test_a_run_with_an_impossible_memory_is_refused(figure: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "table.csv", {**LIGER, "value_published": figure})
    with pytest.raises(UserError, match=r"at .*table.csv:2, found: .* to be a number above 0"):
        read_published(path)


def test_a_safe_figure_is_compared_by_the_metric_of_the_row() -> None:
    job = fms.job_of({**FMS, "metric": "smi (peak memory.used)"})
    assert isinstance(job, PublishedJob)
    low, high = (Result({"smi": 1}, {"smi": safe}) for safe in (2**30, 2**40))
    assert (PublishedComparison(job, low).safe_over or 0) < 0 < (PublishedComparison(job, high).safe_over or 0)
    assert PublishedComparison(replace(job, metric="allocated"), low).safe_over is None


def test_the_share_of_safe_figures_that_are_too_low_has_an_interval() -> None:
    job = fms.job_of({**FMS, "metric": "smi (peak memory.used)"})
    assert isinstance(job, PublishedJob)
    results = [Result({"smi": 1}, {"smi": safe}) for safe in (2**30, 2**40, 2**40, 2**40)]
    figures = _safe_figures(PublishedComparison(job, item) for item in results)
    low, high = figures["safe_too_low_interval"]
    assert (figures["safe_too_low"], figures["safe_jobs"]) == (0.25, 4)
    assert 0 < low < 0.25 < high < 0.75
    assert figures["safe_over_relative_median"] == pytest.approx(2**40 / job.published_bytes - 1)
    assert _safe_figures([])["safe_too_low_interval"] is None


def test_other_tables_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "table.csv", {"batch": "8", "mib": "900"})
    assert main(["--data", str(path)]) == 2
    assert "found no column" in capsys.readouterr().err


def _small_fms(**changes: object) -> PublishedJob:
    job = fms.job_of(FMS)
    assert isinstance(job, PublishedJob)
    small = {**network("mistral-7b"), **SMALL}
    return replace(job, parameters={**job.parameters, "network": small, "tokens": 513, "length": 64, **changes})


def _run(job: PublishedJob) -> Figures:
    try:
        figures, report = run_job(job, Path(__file__).parents[2] / ".venvs")
    except UserError as error:
        if "make stacks" in str(error):
            pytest.skip(str(error))
        raise
    assert report is not None and report.simulation is not None
    return figures


def test_the_sft_trainer_runs_a_quantised_base() -> None:
    assert 0 < _run(_small_fms()).allocated_bytes < 64 * MIB
