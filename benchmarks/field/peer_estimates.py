"""Estimates of fine-tuning jobs by other estimators: run by `peers` in an environment that has them.

Usage: python peer_estimates.py < JOBS, a JSON list; prints a list with the bytes of each estimator, or why it has none.
Each estimator gets as much of the job as it can take. CUDA's context and fragmentation are left out where it lists
them, because the measured figures have neither. "-" says that it cannot describe the job.
"""

import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):  # compiled for another torch: transformers must not try it
    sys.modules["torchvision"] = None

from transformers import AutoConfig, AutoModelForCausalLM

NOT_DESCRIBED = "-"
MIB = 2**20
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def on_meta(job):
    """Return the network without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**job["config"]), dtype=torch.float32)


def adapter_parameters(job, network):
    """Return the number of parameters of LoRA's matrices."""
    layers = [layer for name, layer in network.named_modules() if name.rpartition(".")[2] in targets(job, network)]
    return job["lora"]["r"] * sum(layer.in_features + layer.out_features for layer in layers)


def targets(job, network):
    """Return the targets of LoRA that the network has: some jobs name those of several architectures."""
    names = {name.rpartition(".")[2] for name, _ in network.named_modules()}
    return [name for name in job["lora"]["target_modules"] if name in names]


def accelerate(job, network):
    """Return what `accelerate estimate-memory` prints for training with Adam: the largest of its phases."""
    import accelerate.utils

    accelerate.utils.is_timm_available = lambda: False  # it would import timm, which is not needed here
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    if job["lora"]:
        return NOT_DESCRIBED
    total, _ = calculate_maximum_sizes(network)
    return max(estimate_training_usage(total, DTYPES[job["dtype"]]).values())


def deepspeed(job, network):
    """Return the model states of ZeRO-2 on one GPU; activations are not part of it."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    if job["lora"]:
        return NOT_DESCRIBED
    count = sum(item.numel() for item in network.parameters())
    return estimate_zero2_model_states_mem_needs(count, num_gpus_per_node=1, num_nodes=1, cpu_offload=False)[1]


def fitcheck(job, network):
    """Return the total without its overhead, which is context and cache; the config.json is a local one."""
    from fitcheck import config_parser, estimator, gpu_db

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(job["config"]))
        config_parser.hf_hub_download = lambda **_: str(path)
        config_parser._reported_param_count = lambda *_: sum(item.numel() for item in network.parameters())
        config = config_parser.fetch_model_config("local/network")
    lora = job["lora"] or {}
    training = estimator.TrainingConfig(
        precision=job["dtype"], quantization="nf4" if job["quantised"] else "none", double_quant=job["quantised"],
        optimizer="adamw", optimizer_dtype="fp32" if lora else job["dtype"], batch_size=job["batch_size"],
        seq_len=job["length"], lora_rank=lora.get("r"), grad_checkpoint=job["checkpointing"], flash_attn=True,
        **({"lora_targets": targets(job, network)} if lora else {}),
    )  # fmt: skip
    report = estimator.estimate(config, training, gpu_db.GPU_DB[job["gpu"]])
    return (report.total_mib - report.overhead_mib) * MIB


def torch_preflight(job, network):
    """Return the total without context and fragmentation."""
    from torch_preflight import vram
    from torch_preflight.vram.costmodel import params_from_transformer_shape
    from torch_preflight.vram.providers.hub import shape_from_config

    if job["quantised"]:
        return NOT_DESCRIBED
    shape = shape_from_config(job["config"])
    count = params_from_transformer_shape(shape)
    profile = vram.ModelProfile("network", count, count, "hub", vram.Confidence.MEDIUM, shape=shape)
    profile.kind = type(profile.kind)("transformer")
    config = vram.RunConfig(
        batch_size=job["batch_size"], seq_len=job["length"], optimizer=vram.OptimizerKind.ADAMW,
        precision=vram.PrecisionMode(f"pure-{job['dtype']}"), gradient_checkpointing=job["checkpointing"],
        flash_attention=True, frozen_fraction=1 - adapter_parameters(job, network) / count if job["lora"] else 0.0,
    )  # fmt: skip
    parts = vram.estimate_config(profile, config, with_remediations=False).breakdown
    return parts.total - parts.cuda_context - parts.fragmentation


def kitsune(job, network):
    """Return the total without its overhead; it knows no checkpointing."""
    from kitsune.predict.estimator import predict_memory
    from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory

    dtype = getattr(torch, DTYPES[job["dtype"]])
    words = {"input_shape": (job["length"],), "batch_size": job["batch_size"], "dtype": dtype}
    if not job["lora"]:
        result = predict_memory(network.to(dtype), optimizer="adamw", training=True, **words)
        return result.total_bytes - result.overhead_bytes
    names = tuple(targets(job, network))
    config = LoRAConfig(rank=job["lora"]["r"], target_modules=names, use_qlora=job["quantised"], optimizer="adamw")
    # 4 bits are computed from 32: QLoRA takes the network in fp32
    result = estimate_lora_memory(network if job["quantised"] else network.to(dtype), config=config, **words)
    return result.total_bytes - result.overhead_bytes


def vram_check(job, network):
    """Return the total; frozen and quantised weights are unknown to it."""
    from vram_check.estimator import estimate

    if job["lora"]:
        return NOT_DESCRIBED
    count = sum(item.numel() for item in network.parameters())
    return estimate(count, job["batch_size"], job["dtype"], "adamw", seq_len=job["length"]).total_bytes


def fm_training_estimator(job, network):
    """Return the theoretical total; the folder of the network has a config.json and a tokenizer."""
    from fm_training_estimator import memory
    from fm_training_estimator.config import FMArguments, HFTrainingArguments, PeftLoraConfig, PeftQLoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        network.config.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
        arguments = FMArguments(base_model_path=folder, torch_dtype=DTYPES[job["dtype"]], block_size=job["length"])
        training = HFTrainingArguments(
            output_dir=folder, per_device_train_batch_size=job["batch_size"], optim="adamw_torch",
            gradient_checkpointing=job["checkpointing"],
        )  # fmt: skip
        if not job["lora"]:
            return memory.FullParameterTuningEstimator(arguments, training).get_total_mem_estimate()
        lora = PeftLoraConfig(r=job["lora"]["r"], target_modules=targets(job, network))
        if not job["quantised"]:
            return memory.LoraEstimator(arguments, training, lora).get_total_mem_estimate()
        form = PeftQLoraConfig(quant_type="nf4", use_double_quant=True)
        return memory.QLoraEstimator(arguments, training, lora, form).get_total_mem_estimate()


ESTIMATORS = (accelerate, deepspeed, fitcheck, torch_preflight, kitsune, vram_check, fm_training_estimator)


def estimates(job):
    """Return the figure of each estimator for a job."""
    answers = {}
    for estimator in ESTIMATORS:
        try:
            answers[estimator.__name__] = estimator(job, on_meta(job))
        except Exception as error:
            answers[estimator.__name__] = f"{type(error).__name__}: {error}"
    return answers


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):
        answered = [estimates(job) for job in json.load(sys.stdin)]
    print(json.dumps(answered))
