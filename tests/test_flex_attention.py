"""flex_attention on the virtual GPU: compiled, it keeps its output and a number for each query; else all scores."""

import pytest
import torch
from torch import nn

import vramcast

B, H, L, E = 2, 4, 512, 64
SCORES = 4 * B * H * L * L
OUT = 2 * B * H * L * E
SUMS = 4 * B * H * L


class Attention(nn.Module):
    def forward(self, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, L, L, device="cuda")
        return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j), block_mask=mask)


def measured(compiled):
    """Return the bytes that the forward pass keeps, its peak, and that of the backward pass."""
    with vramcast.VirtualGPU("a100_40gb") as gpu:
        torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the workspace of cuBLAS
        network = torch.compile(Attention()) if compiled else Attention()
        q, k, v = (torch.randn(B, H, L, E, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        before = torch.cuda.memory_allocated()
        out = network(q, k, v)
        kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()  # the block mask counts its places as 64-bit integers
        out.sum().backward()
        both = torch.cuda.max_memory_allocated() - before
        assert q.grad.shape == q.shape
    return kept, peak, both, " ".join(gpu.report.assumptions)


def test_compiled_flex_attention_keeps_no_scores():
    kept, _, both, assumed = measured(compiled=True)
    assert kept == pytest.approx(OUT + SUMS, abs=2**13), "with the block mask"
    assert both == pytest.approx(kept + 4 * OUT + SUMS, abs=2**17), "four gradients, of which autograd makes one dense"
    assert "compiled flex_attention is simulated by the tensors of its kernel" in assumed


def test_uncompiled_flex_attention_computes_all_scores():
    kept, peak, both, assumed = measured(compiled=False)
    assert kept == pytest.approx(OUT + SUMS, abs=2**13), "with the block mask; the scores are computed again"
    assert 3 * SCORES <= peak < 4 * SCORES and peak < both < 6 * SCORES
    assert "without torch.compile computes all scores" in assumed
