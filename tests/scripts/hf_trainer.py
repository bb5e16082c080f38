"""A small causal language model under the Trainer of transformers."""

import argparse

from tiny_text import RandomTexts, make_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    GPT2Config,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true", help="texts of one length")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--save-steps", type=int, default=1000)
parser.add_argument("--count", type=int, default=96)
args = parser.parse_args()
set_seed(42)
tokenizer = make_tokenizer()
config = GPT2Config(
    n_layer=6, n_head=8, n_embd=512, vocab_size=1003, pad_token_id=1001, bos_token_id=0, eos_token_id=1002
)
model = AutoModelForCausalLM.from_config(config)
lengths = (128, 128) if args.fixed else (20, 200)
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=8, gradient_accumulation_steps=args.accumulate, bf16=args.bf16,
    gradient_checkpointing=args.checkpointing, num_train_epochs=2, learning_rate=3e-4, logging_steps=2,
    save_steps=args.save_steps, eval_strategy="steps" if args.evaluate else "no", eval_steps=2, report_to="none",
    warmup_steps=10, lr_scheduler_type="cosine", remove_unused_columns=False,
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=RandomTexts(tokenizer, args.count, *lengths),
    eval_dataset=RandomTexts(tokenizer, 16, *lengths), processing_class=tokenizer,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)  # fmt: skip
assert trainer.args.device.type == "cuda" and next(model.parameters()).is_cuda
print(trainer.train().metrics)
