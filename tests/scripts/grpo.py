"""Group relative policy optimization of TRL: completions of full length, a reward of the script's own."""

import sys

from datasets import Dataset
from tiny_text import make_tokenizer, text
from transformers import Qwen2Config
from trl import GRPOConfig, GRPOTrainer

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1003},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936},
}  # fmt: skip
size, new_tokens = sys.argv[1], int(sys.argv[2])
heads = {"num_attention_heads": 14, "num_key_value_heads": 2} if size == "0.5b" else {"num_attention_heads": 4}
config = Qwen2Config(
    **SIZES[size], **heads, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1002, pad_token_id=1001
)
config.architectures = ["Qwen2ForCausalLM"]
config.save_pretrained("policy")
arguments = GRPOConfig(
    output_dir="out", per_device_train_batch_size=8, num_generations=8, max_completion_length=new_tokens, bf16=True,
    beta=0.04, learning_rate=1e-6, report_to="none", max_steps=40, logging_steps=1,
    model_init_kwargs={"dtype": "bfloat16"},
)  # fmt: skip


def reward(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


trainer = GRPOTrainer(
    model="policy", reward_funcs=reward, args=arguments, processing_class=make_tokenizer(),
    train_dataset=Dataset.from_dict({"prompt": [text(index, 40, 60) for index in range(64)]}),
)  # fmt: skip
trainer.train()
