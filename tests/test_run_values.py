"""Values on the virtual GPU: inference mode, numbers that nobody knows, large masks, and weights that are tied."""

import json

import pytest
import torch
from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation

MIB = 2**20


@pytest.fixture
def gpu():
    with CudaEmulation(load_profile("a100_40gb"), unbounded=True) as gpu:
        yield gpu


def peak_of(mode):
    with CudaEmulation(load_profile("a100_40gb"), unbounded=True), mode():
        attention = nn.MultiheadAttention(256, 4, batch_first=True).cuda()
        inputs = torch.randn(8, 128, 256).to("cuda")
        attention(inputs, inputs, inputs)
        return torch.cuda.max_memory_allocated()


def test_inference_mode_takes_the_memory_of_no_grad():
    assert peak_of(torch.inference_mode) == peak_of(torch.no_grad) > MIB


def test_a_weight_moves_in_inference_mode(gpu):
    linear = nn.Linear(2048, 2048, bias=False).cuda()
    with torch.inference_mode():
        linear.weight.data = linear.weight.data.cpu()
    assert linear.weight.device.type == "cpu" and torch.cuda.memory_allocated() == 0


def test_unknown_numbers_differ_and_are_noted(gpu):
    rows = torch.randn(64, 2048, device="cuda").mm(torch.randn(2048, 16, device="cuda")).cpu().numpy()
    assert len({tuple(row) for row in rows}) == 64 and rows.min() >= 1
    real = torch.zeros(4, 4)
    real.copy_(torch.randn(2048, 2048, device="cuda")[:4, :4])
    assert real.unique().numel() == 16
    assert any("taken as 1.0" in str(item) for item in gpu.assumptions.all())


def test_a_mask_of_a_whole_weight_is_known(gpu):
    places = torch.randperm(3072 * 3072)[:1000].to("cuda")
    mask = torch.zeros(3072 * 3072).to(torch.ones(1, dtype=torch.bool).to("cuda"))
    mask = mask.scatter_(0, places, torch.ones(1000, dtype=torch.bool).to("cuda")).view(3072, 3072)
    assert torch.where(mask == 1.0)[0].shape == (1000,)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_of_a_folder_without_weights_are_loaded_once(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 32768,
        "dtype": "bfloat16", "tie_word_embeddings": tied,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with CudaEmulation(load_profile("a100_40gb"), unbounded=True):
        network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).cuda()
        rest = 4 * 256 * 256 + 3 * 256 * 512 + 3 * 256
        expected = 2 * (rest + (1 if tied else 2) * 32768 * 256)
        assert torch.cuda.memory_allocated() == pytest.approx(expected, rel=0.001)
        assert (network.lm_head.weight is network.model.embed_tokens.weight) == tied
