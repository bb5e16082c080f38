"""Supervised fine-tuning as ms-swift 1.5 does it, with its own Trainer and LoRA, on batches of given lengths.

Usage: python swift_sft.py PARAMETERS, a JSON object.
"""

import sys
import tempfile
from types import ModuleType

import flash_attn
import torch
from common import parameters, untrained, write_figures
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from swift.tuners import LoRAConfig, Swift
from torch.nn.utils.rnn import pad_sequence


def main():
    """Train one step for each length and write the peaks of the run."""
    job = parameters()
    network = _network(job)
    if job["lora"]:
        network = Swift.prepare_model(network, LoRAConfig(**job["lora"]))
    arguments = Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=job["batch_size"], num_train_epochs=1,
        gradient_accumulation_steps=job["accumulate"], weight_decay=0.01, max_grad_norm=0.5, bf16=True,
        lr_scheduler_type="cosine", warmup_ratio=0.05, optim="adamw_torch", logging_steps=5, save_strategy="no",
        evaluation_strategy="no", remove_unused_columns=False, report_to=[], train_sampler_random=False,
        gradient_checkpointing=job["checkpointing"], sortish_sampler=True,
    )  # fmt: skip
    if job["checkpointing"]:
        network.config.use_cache = False
        network.enable_input_require_grads()
    trainer = Seq2SeqTrainer(
        model=network, args=arguments, data_collator=_collate, train_dataset=_samples(job), check_model=False
    )
    trainer.train()
    write_figures(job)


def _network(job):
    """Build the network: Qwen's own code, or that of transformers."""
    if job["network"]["model_type"] == "qwen":
        return _qwen(job)
    return untrained(job["network"], torch.bfloat16, "flash_attention_2")


def _qwen(job):
    """Build Qwen from the code in modelscope, which knows flash-attention by its first name."""
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.flash_attn_unpadded_func = flash_attn.flash_attn_varlen_func
    sys.modules[interface.__name__] = interface
    from modelscope.models.nlp.qwen import backbone
    from modelscope.models.nlp.qwen.configuration import QWenConfig
    from modelscope.models.nlp.qwen.text_generation import QWenForTextGeneration

    backbone.rms_norm = None  # a compiled kernel that the package of flash-attention does not install
    values = {name: value for name, value in job["network"].items() if name != "model_type"}
    config = QWenConfig(**values, bf16=True, fp16=False, use_flash_attn=True, params_dtype="bfloat16", pos_emb="rotary")
    with torch.device("meta"):
        network = QWenForTextGeneration(config)
    for block in network.transformer.h:
        block.attn.bias = None  # a mask for each layer, which releases after September 2023 do not have
    return network.to_empty(device="cuda")


def _samples(job):
    """Return one sample for each place of the batches, in order."""
    count = job["batch_size"] * job["accumulate"]
    return [{"input_ids": [3] * length} for length in job["lengths"] for _ in range(count)]


def _collate(samples):
    """Pad a batch to its longest sample."""
    ids = [torch.tensor(item["input_ids"]) for item in samples]
    padded = pad_sequence(ids, batch_first=True, padding_value=0)
    return {"input_ids": padded, "attention_mask": torch.ones_like(padded), "labels": padded.clone()}


main()
