"""Fine-tune a language model by a plain loop or by the Trainer, and write the peak: run by `qwen_cases`.

Usage: python qwen_sft.py JOB, a JSON object. It needs transformers, peft for LoRA, accelerate for the Trainer.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(job):
    """Train for some optimizer steps and write what `max_memory_allocated` says."""
    config = AutoConfig.for_model(**job["config"], use_cache=False)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    adapter = None
    if job["lora"]:
        from peft import LoraConfig

        adapter = LoraConfig(**job["lora"], task_type="CAUSAL_LM")
    {"plain": plain, "single": plain, "trainer": trainer}[job["loop"]](network, adapter, job)
    Path(job["figures"]).write_text(json.dumps(torch.cuda.max_memory_allocated()))


def adapted(network, adapter, job):
    """Return the network with its adapter on it."""
    from peft import get_peft_model

    if job["checkpointing"]:
        network.enable_input_require_grads()
    return get_peft_model(network, adapter)


def plain(network, adapter, job):
    """Run the loop of tutorials, in which `outputs` lives until the next pass."""
    if job["checkpointing"]:
        network.gradient_checkpointing_enable()
    network = (adapted(network, adapter, job) if adapter else network).to("cuda").train()
    trained = [item for item in network.parameters() if item.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False if job["loop"] == "single" else None)
    ids = torch.ones(job["batch_size"], job["tokens"], dtype=torch.long, device="cuda")
    for _ in range(job["steps"]):
        for _ in range(job["accumulate"]):
            outputs = network(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
            loss = outputs.loss / job["accumulate"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def arguments(job):
    """Return the arguments of the Trainer; the optimizer is the default of its release."""
    return dict(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=job["batch_size"], max_steps=job["steps"],
        gradient_accumulation_steps=job["accumulate"], gradient_checkpointing=job["checkpointing"],
        save_strategy="no", report_to="none",
    )  # fmt: skip


def rows(job):
    """Return equal sequences of tokens."""
    ids = [1] * job["tokens"]
    return [{"input_ids": ids, "labels": ids}] * (job["steps"] * job["batch_size"] * job["accumulate"])


def trainer(network, adapter, job):
    """Run the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    network = adapted(network, adapter, job) if adapter else network
    options = TrainingArguments(**arguments(job))
    Trainer(model=network, args=options, train_dataset=rows(job), data_collator=default_data_collator).train()


main(json.loads(sys.argv[1]))
