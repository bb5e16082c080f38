"""Full fine-tuning of Mistral-7B in bf16 under the Trainer: batch 4 x 4,096 tokens, gradient checkpointing."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, MistralConfig, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 32000, (4096,))
        return {"input_ids": ids, "labels": ids.clone()}


config = MistralConfig(sliding_window=None, num_hidden_layers=int(sys.argv[1]) if len(sys.argv) > 1 else 32)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_checkpointing=True, optim="adamw_torch", max_steps=10,
    learning_rate=1e-5, logging_steps=1, report_to="none", save_strategy="no",
)  # fmt: skip
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
