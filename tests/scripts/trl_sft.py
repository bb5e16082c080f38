"""Supervised fine-tuning of TRL with packed samples and LoRA."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_text import make_tokenizer, text
from transformers import AutoModelForCausalLM, LlamaConfig
from trl import SFTConfig, SFTTrainer

tokenizer = make_tokenizer()
config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=1003, pad_token_id=1001, bos_token_id=0, eos_token_id=1002,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
arguments = SFTConfig(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True, report_to="none",
    gradient_checkpointing=True, logging_steps=1, max_length=256, packing=True, num_train_epochs=1, save_steps=5,
)  # fmt: skip
trainer = SFTTrainer(
    model=model, args=arguments, train_dataset=Dataset.from_dict({"text": [text(i, 30, 300) for i in range(96)]}),
    peft_config=LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
