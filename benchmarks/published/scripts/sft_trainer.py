"""Supervised fine-tuning as fms-hf-tuning's `sft_trainer` does it: trl's SFTTrainer on packed sequences.

Under `accelerate launch` it trains one rank of several.

Usage: python sft_trainer.py PARAMETERS, a JSON object.
"""

import tempfile

import torch
import trl
from common import (
    DTYPES,
    keep_inputs,
    parameters,
    quantised,
    release,
    sequences,
    tokenizer,
    unplaced,
    untrained,
    write_figures,
)
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer

STEPS = 2


def main():
    """Train for some steps and write the figures that the Trainer would report."""
    job = parameters()
    if job["keeps_inputs"]:
        keep_inputs()
    words = (job["network"], DTYPES[job["dtype"]], "flash_attention_2")
    build = unplaced if job["ranks"] > 1 else untrained
    network = quantised(*words, job["quantisation"]) if job["quantisation"] else build(*words)
    network.resize_token_embeddings(job["tokens"])
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=job["batch_size"], max_steps=STEPS, packing=True,
        gradient_checkpointing=True, adam_epsilon=1e-4, weight_decay=0.01, optim="adamw_torch", logging_steps=10,
        gradient_accumulation_steps=job["accumulate"], save_strategy="no", report_to="none", warmup_steps=10,
        include_tokens_per_second=True, skip_memory_metrics=True, dataset_kwargs={"skip_prepare_dataset": True},
        bf16=job["autocast"] == "bf16", fp16=job["autocast"] == "fp16", max_seq_length=job["length"],
    )  # fmt: skip
    adapter = LoraConfig(**job["lora"], task_type="CAUSAL_LM", bias="none") if job["lora"] else None
    if job["prepared"]:  # the plug-in prepares the network, without the casts of peft
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs)
        network.requires_grad_(False)
        network.enable_input_require_grads()
        network, adapter = get_peft_model(network, adapter), None
    key = "tokenizer" if release(trl) < (0, 12) else "processing_class"
    rows = sequences((STEPS + 1) * job["batch_size"] * job["accumulate"] * job["ranks"], job["length"])
    trainer = SFTTrainer(model=network, args=arguments, train_dataset=rows, peft_config=adapter, **{key: tokenizer()})
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    write_figures(job)


main()
