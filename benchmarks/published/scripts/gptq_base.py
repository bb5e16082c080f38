"""A base quantised by GPTQ, as AutoGPTQ's second Triton kernel stores and multiplies it."""

import torch
from common import configuration, network_options
from peft.tuners.lora import model as lora_model
from peft.tuners.lora.gptq import QuantLinear
from torch import nn
from transformers import AutoModelForCausalLM


class _Product(torch.autograd.Function):
    """The product with a weight that is unpacked in each pass and kept in none."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x @ layer.unpacked().to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.unpacked().to(gradient.dtype).t(), None


class GptqLinear(nn.Module):
    """A linear layer whose weight is packed into integers, with scales and zeros for each group of inputs or all."""

    def __init__(self, infeatures, outfeatures, bits, group_size, dtype):
        super().__init__()
        self.infeatures, self.outfeatures, self.dtype = infeatures, outfeatures, dtype
        groups = -(-infeatures // (group_size or infeatures))
        self.register_buffer("qweight", torch.zeros(infeatures * bits // 32, outfeatures, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(groups, outfeatures * bits // 32, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(groups, outfeatures, dtype=dtype))
        self.register_buffer("g_idx", torch.zeros(infeatures, dtype=torch.int32))

    def unpacked(self):
        """Return the weight."""
        return torch.empty(self.infeatures, self.outfeatures, dtype=self.scales.dtype, device=self.qweight.device)

    def forward(self, x):
        x = x.to(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled() else x
        out = _Product.apply(x.reshape(-1, self.infeatures), self)
        return out.reshape(*x.shape[:-1], self.outfeatures)


def packed(values, dtype, attention, bits, group_size):
    """Build a network whose linear layers, but for the head, are packed; adapters go on top of them."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(configuration(values), **network_options(dtype, attention))
    with torch.device("cuda"):
        for module in list(network.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name not in ("lm_head", "gate"):
                    layer = GptqLinear(child.in_features, child.out_features, bits, group_size, dtype)
                    setattr(module, name, layer)
        for module in network.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cuda")))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta and buffer.device.type == "meta":
                    module.register_buffer(name, torch.zeros_like(buffer, device="cuda"), persistent=False)
    lora_model.dispatch_gptq = _adapted
    return network


def _adapted(target, adapter_name, **options):
    """Return the adapter of PEFT for a packed layer."""
    return QuantLinear(target, adapter_name, **options) if isinstance(target, GptqLinear) else None
