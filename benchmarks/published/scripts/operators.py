"""Single operators in torch's and transformers' form, stepped as the benchmarks of Liger-Kernel step them.

Usage: python operators.py PARAMETERS, a JSON object.
"""

import statistics

import torch
from common import parameters, write_figures
from torch import nn
from torch.nn import functional

DTYPES = {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}
REPEATS = 4


def main():
    """Measure an operator and write the median of its peaks."""
    job = parameters()
    values = {**job["config"], "dtype": DTYPES[job["config"].get("dtype", "torch.float32")]}
    if job["operator"] in MULTIPLYING:
        _hold_workspaces()
    step = _step(*OPERATORS[job["operator"]](values), job["mode"], job["gradient"])
    peaks = []
    for _ in range(REPEATS):
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())
    write_figures(job, allocated_bytes=int(statistics.median(peaks)))


def _step(inputs, forward, mode, gradient):
    """Return the function whose peak is measured; the gradient of the output is made before it or inside of it."""
    if mode == "forward":
        return forward
    if mode == "backward":
        y = forward()
        held = torch.randn_like(y)
        return lambda: y.backward(held, retain_graph=True)
    held = torch.randn_like(inputs) if gradient == "kept" else None

    def full():
        y = forward()
        if gradient == "none":
            y.backward(retain_graph=True)
        elif gradient == "summed":
            y.sum().backward()
        else:
            y.backward(torch.randn_like(y) if held is None else held, retain_graph=True)

    return full


def _hold_workspaces():
    """Let cuBLAS hold the workspaces of both threads: the benchmarks have measured the speed of a full step before."""
    weight = torch.ones(8, 8, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()


def _random(*shape, dtype=torch.float32, gradient=True):
    return torch.randn(*shape, dtype=dtype, device="cuda", requires_grad=gradient)


def _cross_entropy(values):
    x = _random(values["rows"], values["vocabulary"])
    target = torch.randint(values["vocabulary"], (values["rows"],), device="cuda")
    loss = nn.CrossEntropyLoss()
    return x, lambda: loss(x, target)


def _kl_div(values):
    shape = (values["rows"], values["vocabulary"])
    x = _random(*shape).log_softmax(dim=-1)
    target = _random(*shape, gradient=False).softmax(dim=-1)
    loss = nn.KLDivLoss(reduction="batchmean")
    return x, lambda: loss(x, target)


def _jsd(values):
    shape = (values["rows"], values["vocabulary"])
    x = _random(*shape).log_softmax(dim=-1)
    target = _random(*shape, gradient=False).log_softmax(dim=-1)
    divergence = nn.KLDivLoss(reduction="none", log_target=True)

    def loss():
        log_p, log_q = target.float(), x.float()
        mean = torch.lerp(torch.exp(log_q), torch.exp(log_p), 0.5)
        both = 0.5 * divergence(torch.log(mean), log_p).sum(dim=-1)
        both = both + 0.5 * divergence(torch.log(mean), log_q).sum(dim=-1)
        return (both / log_q.shape[0]).sum()

    return x, loss


def _tvd(values):
    shape = (values["rows"], values["vocabulary"])
    x = _random(*shape).softmax(dim=-1)
    target = _random(*shape, gradient=False).softmax(dim=-1)
    return x, lambda: torch.sum(torch.abs(x - target) / 2.0) / x.size(0)


def _layer_norm(values):
    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    layer = nn.LayerNorm(values["hidden_size"], eps=1e-6).to("cuda").to(values["dtype"])
    return x, lambda: layer(x)


def _rms_norm(values):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    layer = LlamaRMSNorm(values["hidden_size"]).to("cuda")
    return x, lambda: layer(x)


def _group_norm(values):
    channels = values["hidden_size"]
    x = _random(values["rows"], channels, values["H"], dtype=values["dtype"])
    groups = channels // values["channels_per_group"]
    layer = nn.GroupNorm(groups, channels, eps=1e-6).to(device="cuda", dtype=values["dtype"])
    return x, lambda: layer(x)


def _softmax(values):
    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    return x, lambda: torch.softmax(x, dim=-1)


def _mlp(values):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    names = ("hidden_size", "intermediate_size", "hidden_act")
    layer = LlamaMLP(LlamaConfig(**{name: values[name] for name in names})).to("cuda").to(values["dtype"])
    x = _random(values["batch_size"], values["length"], values["hidden_size"], dtype=values["dtype"])
    return x, lambda: layer(x)


def _rotated(values):
    """Return queries, keys and angles, which the releases of that time compute by a matrix product."""
    heads, length = values["heads"], values["length"]
    size = values["hidden_size"] // heads
    pair = [_random(1, length, count, size, dtype=values["dtype"]) for count in (heads, values["kv_heads"])]
    frequencies = torch.ones(1, size // 2, 1, device="cuda")
    positions = torch.arange(length, device="cuda").view(1, 1, -1)
    return pair, (frequencies @ positions.float()).transpose(1, 2)


def _rotations(values):
    """Return queries, keys, cosines and sines as transformers' Llama passes them to its rotation."""
    pair, angles = _rotated(values)
    q, k = (item.transpose(1, 2) for item in pair)
    angles = torch.cat((angles, angles), dim=-1)
    return q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def _rope(values):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, cos, sin = _rotations(values)
    if not values["both"]:
        return q, lambda: apply_rotary_pos_emb(q, k, cos, sin)[0]
    return q, _both(lambda: apply_rotary_pos_emb(q, k, cos, sin), q, k)


def _llama4_rope(values):
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

    (q, k), angles = _rotated(values)
    turns = torch.polar(torch.ones_like(angles), angles)
    del angles
    if not values["both"]:
        return q, lambda: apply_rotary_emb(q, k, turns)[0]
    return q, _both(lambda: apply_rotary_emb(q, k, turns), q, k)


class _Both:
    """Two outputs whose gradients with respect to two inputs are returned, not stored."""

    def __init__(self, outputs, inputs, gradients):
        self._words = (outputs, inputs, gradients)

    def backward(self, *_, retain_graph):
        torch.autograd.grad(*self._words, allow_unused=True, retain_graph=retain_graph)


def _both(forward, q, k):
    gradients = (torch.randn_like(q), torch.randn_like(k))
    return lambda: _Both(forward(), (q, k), gradients)


class _AddNorm(nn.Module):
    """The sum with a residual, normalised by its root mean square in single precision."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, residual):
        dtype = x.dtype
        x = x.to(torch.float32) + residual.to(torch.float32)
        residual = x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype), residual.to(dtype)


def _add_norm(values):
    shape = (values["rows"], values["hidden_size"])
    x, residual = (_random(*shape, dtype=values["dtype"]) for _ in range(2))
    layer = _AddNorm(values["hidden_size"]).to("cuda")
    if not values["both"]:
        return x, lambda: layer(x, residual)[0]
    gradients = [_random(*shape, dtype=values["dtype"], gradient=False) for _ in range(2)]
    return x, lambda: _Stored(layer(x, residual), gradients)


class _Stored:
    """Two outputs whose gradients are stored in the inputs."""

    def __init__(self, outputs, gradients):
        self._words = (outputs, gradients)

    def backward(self, *_, retain_graph):
        torch.autograd.backward(*self._words, retain_graph=retain_graph)


def _fused_linear_cross_entropy(values):
    sizes = {"bias": False, "dtype": values["dtype"], "device": "cuda"}
    layer, others = (nn.Linear(values["hidden_size"], values["vocabulary"], **sizes) for _ in range(2))
    x = _random(values["rows"], values["hidden_size"], dtype=values["dtype"])
    target = torch.randint(values["vocabulary"], (values["rows"],), device="cuda")
    loss = nn.CrossEntropyLoss()

    def forward(_=others):  # the benchmark makes Liger's layer beside that of torch
        return loss(layer(x), target)

    return x, forward


def _torch_rms_norm(values):
    layer = nn.RMSNorm(values["hidden_size"], eps=1e-6).to("cuda").to(torch.bfloat16)
    x = _random(values["rows"], values["batch_size"], values["hidden_size"], dtype=torch.bfloat16)
    return x, lambda: layer(x)


def _chunked_swiglu(values):
    x = _random(values["rows"], values["batch_size"], 2 * values["intermediate_size"], dtype=torch.bfloat16)

    def forward():
        x.grad = None
        first, second = torch.chunk(x, 2, -1)
        return functional.silu(first) * second

    return x, forward


OPERATORS = {
    "cross_entropy": _cross_entropy,
    "kl_div": _kl_div,
    "jsd": _jsd,
    "tvd": _tvd,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "softmax": _softmax,
    "mlp": _mlp,
    "rope": _rope,
    "llama4_rope": _llama4_rope,
    "fused_add_rms_norm": _add_norm,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "megatron_rms_norm": _torch_rms_norm,
    "megatron_swiglu": _chunked_swiglu,
}
MULTIPLYING = {"mlp", "fused_linear_cross_entropy"}

if __name__ == "__main__":
    main()
