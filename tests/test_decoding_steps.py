"""Generations of which only some steps run: peaks and calls are those of all steps."""

import gc
from functools import cache

import pytest
import torch

from vramcast.device.profiles import load_profile
from vramcast.jobs.families.libraries import tolerate_broken_torchvision
from vramcast.virtual_gpu.cuda.decoding_steps import Continuation, DecodingSteps
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.replay.replay import FREE

PROMPT, NEW = 23, {"padded": 96, "encoder-decoder": 96, "plain": 48}


def _network(kind):
    tolerate_broken_torchvision()
    transformers = pytest.importorskip("transformers")
    if kind == "encoder-decoder":
        config = transformers.T5Config(
            vocab_size=500, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config)
    window = {"sliding_window": 50} if kind == "window" else {}
    config = (transformers.MistralConfig if kind == "window" else transformers.LlamaConfig)(
        vocab_size=500, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **window,
    )  # fmt: skip
    return (transformers.MistralForCausalLM if kind == "window" else transformers.LlamaForCausalLM)(config)


@cache
def _generated(kind, runs_all_steps, capacity_bytes=None):
    rows = 2048 if kind == "plain" else 64
    with CudaEmulation(load_profile("a100_80gb")) as gpu:
        gpu.runs_all_steps = runs_all_steps
        network = _network(kind).cuda().eval()
        prompt = torch.randint(3, 500, (rows, PROMPT), device="cuda")
        options, new = {}, NEW.get(kind, 64)
        if kind == "padded":
            options["attention_mask"] = torch.ones_like(prompt)
            options["attention_mask"][0, :7] = 0
        gpu.memory.allocator.set_capacity(capacity_bytes or 2**40)
        before = gpu.memory.allocator.allocated_bytes
        try:
            out = network.generate(prompt, max_new_tokens=new, do_sample=True, top_k=20, **options)
            assert out.shape == (rows, new + (1 if kind == "encoder-decoder" else PROMPT))
            assert network.config.eos_token_id not in out.tolist()[0]
            held = out.numel() * 8
            del out
        except torch.OutOfMemoryError:
            held = None
        gc.collect()
        left = gpu.memory.allocator.allocated_bytes - before
        return gpu, held, left


@pytest.mark.parametrize("kind", ["plain", "padded", "window", "encoder-decoder"])
def test_steps_that_are_not_run_leave_the_peaks_of_a_generation(kind):
    (whole, held, left), (short, held_then, left_then) = (
        _generated(kind, runs_all_steps=every) for every in (True, False)
    )
    assert held == held_then and whole.record.calls == short.record.calls
    assert whole.record.peak.allocated_bytes == short.record.peak.allocated_bytes
    assert whole.record.peak.reserved_bytes == pytest.approx(short.record.peak.reserved_bytes, abs=2 * 2**20)
    assert left_then == pytest.approx(left, abs=2048), "tables of positions stay"
    share = short.tracer.operators / whole.tracer.operators
    # a window is full in the midst: its generation is run to the end
    assert share > 1 if kind == "window" else share < (0.6 if kind == "plain" else 0.8), share


def test_a_generation_that_runs_out_of_memory_in_a_step_that_is_not_run_leaves_nothing_behind():
    whole, _, workspace = _generated("plain", runs_all_steps=True)
    gpu, held, left = _generated("plain", False, whole.record.peak.allocated_bytes - 2**20)
    assert held is None and len(gpu.memory.ooms) == 1 and gpu.tracer.operators < whole.tracer.operators / 2
    assert left == pytest.approx(workspace, abs=2048)
    freed = [block for block, size in gpu.tracer.trace.events if size == FREE]
    assert len(freed) == len(set(freed)), "each block is freed once"


def _events(sizes, previous, first):
    """Return a step that replaces a block of the step before, and has a temporary of its own."""
    return [(first, sizes[0]), (first + 1, sizes[1]), (first + 1, FREE), *[(block, FREE) for block in previous]]


def test_growing_sizes_are_foreseen_and_the_last_blocks_take_the_places_of_the_first():
    steps, previous = DecodingSteps(), []
    for index in range(5):
        steps.add(_events((100 + 10 * index, 7), previous, 2 * index))
        previous = [2 * index]
    assert list(steps.periods()) == [1] and steps.sizes(3, 1) == (170, 7)
    born, events = iter(range(100, 200)), []

    def birth(size, like):
        block = next(born)
        events.append((block, size))
        return block

    continuation = Continuation(steps, 1, birth, events.append)
    continuation.play(2)
    assert events == [(100, 150), (101, 7), (101, FREE), (8, FREE), (102, 160), (103, 7), (103, FREE), (100, FREE)]
    assert continuation.replacements() == {8: 102}


def test_steps_that_pile_something_up_or_grow_unevenly_have_no_period():
    piling, uneven = DecodingSteps(), DecodingSteps()
    for index in range(8):
        piling.add([(index, 100)])
        uneven.add(_events((index**2, 7), [2 * index - 2] if index else [], 2 * index))
    assert not list(piling.periods()) and not list(uneven.periods())
