"""Shared by the scripts: parameters, networks without weights, a tokenizer, sequences, and the figures they write."""

import json
import sys
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parameters():
    """Return the parameters of the job."""
    return json.loads(sys.argv[1])


def write_figures(job, **others):
    """Write the memory that the script would report on a GPU."""
    figures = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        **others,
    }
    Path(job["figures"]).write_text(json.dumps(figures))


def release(library):
    """Return the first two numbers of a library's version."""
    return tuple(int(word) for word in library.__version__.split(".")[:2])


def configuration(values):
    """Return a transformers configuration."""
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def untrained(values, dtype, attention):
    """Build a network on the device from its configuration."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(configuration(values), **network_options(dtype, attention))


def unplaced(values, dtype, attention):
    """Build a network on the host: FSDP places its units on the device."""
    from transformers.modeling_utils import no_init_weights  # of releases 4

    with no_init_weights():
        return AutoModelForCausalLM.from_config(configuration(values), **network_options(dtype, attention))


def network_options(dtype, attention):
    """Return the options of `from_config` under the names of the installed release."""
    name = "torch_dtype" if release(transformers) < (4, 56) else "dtype"
    return {name: dtype, "attn_implementation": attention}


def quantised(values, dtype, attention, quantisation):
    """Build a network with a quantised base: each layer is quantised on the device, one after the other."""
    if "group_size" in quantisation:
        from gptq_base import packed

        return packed(values, dtype, attention, **quantisation)
    import bitsandbytes
    from transformers.integrations import replace_with_bnb_linear

    options = transformers.BitsAndBytesConfig(**quantisation, bnb_4bit_compute_dtype=dtype)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(configuration(values), **network_options(dtype, attention))
        network = replace_with_bnb_linear(network, modules_to_not_convert=["lm_head"], quantization_config=options)
    network.tie_weights()
    made = {}
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, bitsandbytes.nn.Params4bit):
                weight = torch.empty(module.out_features, module.in_features, dtype=dtype, device="cuda")
                module.weight = bitsandbytes.nn.Params4bit(
                    weight, requires_grad=False, quant_type=options.bnb_4bit_quant_type,
                    compress_statistics=options.bnb_4bit_use_double_quant,
                ).to("cuda")  # fmt: skip
            elif parameter.device.type == "meta":
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="cuda"))
                setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.zeros_like(buffer, device="cuda"), persistent=False)
    _mark(network, options)
    return network


def _mark(network, options):
    """Set what `from_pretrained` sets on a quantised network."""
    from transformers.quantizers import AutoHfQuantizer

    network.config.quantization_config = options
    network.is_loaded_in_4bit = network.is_quantized = True
    network.hf_device_map = {"": 0}
    network.hf_quantizer = AutoHfQuantizer.from_config(options, pre_quantized=False)
    network.quantization_method = options.quant_method


def keep_inputs():
    """Keep the inputs of products with a 4-bit weight up to the backward pass, as bitsandbytes before 0.43.2 did."""
    from bitsandbytes.autograd import _functions

    product = _functions.MatMul4Bit
    original = product.forward

    def forward(ctx, A, *others):  # noqa: N803 - the name that the library uses
        out = original(ctx, A, *others)
        ctx.kept = A if any(ctx.needs_input_grad[:2]) else None
        return out

    product.forward = staticmethod(forward)


def tokenizer():
    """Return a tokenizer with a few words: the sequences are token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<pad>": 1, "</s>": 2}
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), **names)


def sequences(count, length):
    """Return a dataset of token ids."""
    from datasets import Dataset

    ids = list(range(3, 3 + 7)) * (length // 7 + 1)
    rows = [ids[:length]] * count
    return Dataset.from_dict({"input_ids": rows, "labels": rows})
