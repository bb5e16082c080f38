"""LoRA of PEFT on a small Llama under the Trainer, with checkpointing."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from tiny_text import make_tokenizer, text
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, LlamaConfig, Trainer, TrainingArguments

tokenizer = make_tokenizer()
config = LlamaConfig(
    hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=1003, pad_token_id=1001, bos_token_id=0, eos_token_id=1002,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
lora = LoraConfig(
    r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    task_type=TaskType.CAUSAL_LM,
)  # fmt: skip
model = get_peft_model(model, lora)
model.print_trainable_parameters()
model.enable_input_require_grads()
samples = [tokenizer(text(i, 200, 200)) for i in range(64)]
samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True, report_to="none",
    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}, logging_steps=1,
    num_train_epochs=1, save_steps=3, optim="adamw_torch",
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=samples,
    data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
)  # fmt: skip
trainer.train()
