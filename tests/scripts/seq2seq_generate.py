"""A Seq2SeqTrainer that generates in its evaluation, and computes metrics of the tokens."""

import sys

import numpy as np
from tiny_text import RandomTexts, make_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)

tokenizer = make_tokenizer()


class Pairs(RandomTexts):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {
            "input_ids": item["input_ids"],
            "attention_mask": item["attention_mask"],
            "labels": item["input_ids"][:16],
        }


def metrics(prediction):
    tokens = np.where(prediction.predictions < 0, 0, prediction.predictions)
    assert tokens.shape[1] <= int(sys.argv[1])
    return {"longest": float((tokens > 0).sum(1).max())}


config = T5Config(
    vocab_size=1003, d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, decoder_start_token_id=1001,
    pad_token_id=1001, eos_token_id=1002,
)  # fmt: skip
network = T5ForConditionalGeneration(config)
arguments = Seq2SeqTrainingArguments(
    output_dir="out", per_device_train_batch_size=8, per_device_eval_batch_size=64, num_train_epochs=2,
    eval_strategy="epoch", save_strategy="no", predict_with_generate=True, generation_max_length=int(sys.argv[1]),
    report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Seq2SeqTrainer(
    network, arguments, train_dataset=Pairs(tokenizer, 400, 20, 40), eval_dataset=Pairs(tokenizer, 128, 20, 40),
    data_collator=DataCollatorForSeq2Seq(tokenizer, network), processing_class=tokenizer, compute_metrics=metrics,
)  # fmt: skip
trainer.train()
