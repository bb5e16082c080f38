"""QLoRA: a base in nf4 with double quantisation, adapters, and AdamW with 8-bit states."""

import sys

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

quantisation = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_use_double_quant=True
)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantisation, device_map={"": 0})
layer = model.model.layers[0].self_attn.q_proj
assert isinstance(layer, bitsandbytes.nn.Linear4bit) and layer.weight.dtype == torch.uint8, layer
print(f"loaded {torch.cuda.memory_allocated() / 2**20:.2f} MiB")
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
samples = [{"input_ids": torch.randint(0, 1000, (128,)).tolist()} for _ in range(32)]
samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, bf16=True, report_to="none", logging_steps=1, optim="adamw_8bit",
    gradient_checkpointing=True, save_strategy="no",
)  # fmt: skip
Trainer(
    model, arguments, train_dataset=samples,
    data_collator=lambda batch: {key: torch.tensor([item[key] for item in batch]) for key in batch[0]},
).train()  # fmt: skip
