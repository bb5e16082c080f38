"""A Trainer that evaluates after each epoch, and computes metrics of all logits."""

import sys

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = torch.arange(256) % 1000
        return {"input_ids": tokens, "labels": tokens}


def compute_metrics(prediction):
    guesses = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((guesses[:, :-1] == prediction.label_ids[:, 1:]).mean())}


network = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, n_positions=256, use_cache=False))
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=3,
    eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True,
)  # fmt: skip
rows = int(sys.argv[1])
trainer = Trainer(network, arguments, train_dataset=Rows(200), eval_dataset=Rows(rows), compute_metrics=compute_metrics)
trainer.train()
