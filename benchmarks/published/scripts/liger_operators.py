"""Single operators in Liger's own form, stepped as the benchmarks of Liger-Kernel step them.

Usage: python liger_operators.py PARAMETERS, a JSON object.
"""

import torch
from operators import OPERATORS, _random, _rotations, main


def _cross_entropy(values):
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    x = _random(values["rows"], values["vocabulary"])
    target = torch.randint(values["vocabulary"], (values["rows"],), device="cuda")
    loss = LigerCrossEntropyLoss()
    return x, lambda: loss(x, target)


def _kl_div(values):
    from liger_kernel.transformers.kl_div import LigerKLDIVLoss

    shape = (values["rows"], values["vocabulary"])
    x = _random(*shape).log_softmax(dim=-1)
    target = _random(*shape, gradient=False).softmax(dim=-1)
    loss = LigerKLDIVLoss(reduction="batchmean")
    return x, lambda: loss(x, target)


def _layer_norm(values):
    from liger_kernel.transformers.layer_norm import LigerLayerNorm

    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    layer = LigerLayerNorm(hidden_size=values["hidden_size"], eps=1e-6).to("cuda").to(values["dtype"])
    return x, lambda: layer(x)


def _group_norm(values):
    from liger_kernel.transformers.group_norm import LigerGroupNorm

    channels = values["hidden_size"]
    x = _random(values["rows"], channels, values["H"], dtype=values["dtype"])
    groups = channels // values["channels_per_group"]
    layer = LigerGroupNorm(num_channels=channels, num_groups=groups, eps=1e-6).to("cuda").to(values["dtype"])
    return x, lambda: layer(x)


def _softmax(values):
    from liger_kernel.transformers.softmax import LigerSoftmax

    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    layer = LigerSoftmax().to("cuda").to(values["dtype"])
    return x, lambda: layer(x)


def _mlp(values):
    from liger_kernel.transformers.geglu import LigerGEGLUMLP
    from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
    from transformers import LlamaConfig

    names = ("hidden_size", "intermediate_size", "hidden_act")
    form = LigerSwiGLUMLP if values["hidden_act"] == "silu" else LigerGEGLUMLP
    layer = form(LlamaConfig(**{name: values[name] for name in names})).to("cuda").to(values["dtype"])
    x = _random(values["batch_size"], values["length"], values["hidden_size"], dtype=values["dtype"])
    return x, lambda: layer(x)


def _rope(values):
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    q, k, cos, sin = _rotations(values)
    return q, lambda: liger_rotary_pos_emb(q, k, cos, sin)[0]


OPERATORS |= {
    "cross_entropy": _cross_entropy,
    "kl_div": _kl_div,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
    "mlp": _mlp,
    "rope": _rope,
}

main()
