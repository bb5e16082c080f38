"""Generation that an end-of-sequence token may end, by several searches."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
network = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
prompt = torch.randint(3, 1000, (1 if "assisted" in sys.argv else 4, 16), device="cuda")
options = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 20},
    "static": {"do_sample": True, "cache_implementation": "static"},
    "beam": {"num_beams": 3},
    "assisted": {"assistant_model": LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()},
}[sys.argv[1]]
out = network.generate(prompt, max_new_tokens=24, **options)
assert out.shape == (len(prompt), 40), out.shape
assert 2 not in out.tolist()[0], "no sequence ends early"
