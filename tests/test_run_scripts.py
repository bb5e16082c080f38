"""Scripts as users write them, run unmodified on a virtual GPU: each test asserts figures, by classify or by hand."""

import importlib.util
import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from script_runs import MIB, SCRIPTS, interpreter_for, peaks, run
from torch import nn

from vramcast.device.profiles import load_profile
from vramcast.models.examples import example_of_simulation
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.replay.simulate import simulate
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile("a100_40gb")


def module(name):
    """Import a script as a module, without running its loop."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def classified(network, make_inputs, **training):
    """Return the peaks in MiB that the loop of classify finds."""
    trace = trace_training(network, make_inputs, TrainingSetup(**training))
    found = simulate(trace, A100, AllocatorOptions())
    return found.allocated_bytes / MIB, found.reserved_bytes / MIB


def images(size):
    return (torch.randn(size, 3, 64, 64, device="meta"),)


def meta_net():
    with torch.device("meta"):
        return module("plain_loop").Net()


def held(report, use, device="a100_40gb"):
    return report.simulation.peaks[device].bounded.breakdown[use]


def parameter_bytes(*networks):
    return sum(item.numel() * item.element_size() for network in networks for item in network.parameters())


def test_a_plain_loop_agrees_with_classify(tmp_path):
    report = run("plain_loop.py", tmp_path=tmp_path)
    allocated, reserved = peaks(report)
    expected = classified(meta_net(), images, batch_size=64)
    assert allocated == pytest.approx(expected[0], abs=1 / 512), "up to the losses that each loop keeps"
    assert reserved == expected[1]
    assert report.ending == "the script ended" and report.forwarded_after == 5 and not report.missing
    assert [item.phase for item in report.phases] == ["loading", "forward", "backward", "optimizer"]
    assert report.steps[0].shapes == ((64, 3, 64, 64),) and len(report.steps) < 16, "of two epochs with 8 steps each"
    assert report.first_step.allocated_bytes < report.steady_step.allocated_bytes, "Adam's state comes with step one"
    assert report.lines[0].place.endswith("plain_loop.py:20"), "the forward holds most"
    assert not (tmp_path / "checkpoint.pt").exists()


def test_mixed_precision_agrees_with_classify(tmp_path):
    for flags in ((), ("--legacy",)):
        report = run("amp_scaler.py", *flags, tmp_path=tmp_path)
        expected = classified(meta_net(), images, batch_size=64, last_batch_size=8, autocast="fp16", optimizer="AdamW")
        allocated, reserved = peaks(report)
        assert allocated == pytest.approx(expected[0], abs=1 / 128)
        assert reserved >= expected[1], "the validation runs in single precision"
        assert report.ending == "the script ended" and len(report.steps) == 8
        assert "evaluation" in {item.phase for item in report.phases} and report.unwritten == ()
        assert report.changes.written == (str(tmp_path / "best.pt"),) and not list(tmp_path.iterdir())
        assert report.simulation.training.autocast == "fp16"


@dataclass
class Output:
    logits: Any
    loss: Any


def test_nanogpt_agrees_with_classify(tmp_path):
    script = module("nanogpt")

    class Stepped(nn.Module):
        def __init__(self):
            super().__init__()
            self.subject = script.GPT()

        def forward(self, x, y):
            return Output(*self.subject(x, y))

    with torch.device("meta"):
        network = Stepped()
    size = (script.batch_size, script.block_size)
    expected = classified(
        network, lambda _: tuple(torch.randint(9, size, device="meta") for _ in range(2)), batch_size=12, loss="own",
        optimizer="AdamW", implementation="fused", autocast="bf16", accumulate=4,
    )  # fmt: skip
    report = run("nanogpt.py", tmp_path=tmp_path)
    allocated, _ = peaks(report)
    assert allocated == pytest.approx(expected[0], rel=0.002)
    assert held(report, "optimizer_state") == pytest.approx(2 * parameter_bytes(network), rel=1e-3)
    assert report.simulation.training.accumulate == 4


def test_compiled_code_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPILE", "1")
    report = run("nanogpt.py", tmp_path=tmp_path, steps=1)
    assert any(item.startswith("torch.compile made") and "forward" in item for item in report.assumptions)


def test_a_gan_counts_an_iteration_once_and_holds_both_networks(tmp_path):
    report = run("gan.py", tmp_path=tmp_path, steps=3)
    assert len(report.steps) == 3
    weights = 4 * (128 * 256 * 16 + 256 * 128 * 16 + 128 * 64 * 16 + 64 * 3 * 16 + 256 + 128 + 64 + 3)
    norms = 4 * (256 + 128 + 64 + 128) * 2
    convolutions = 4 * (3 * 64 * 16 + 64 + 64 * 128 * 16 + 128 + 128 * 256 * 16 + 256 + 256 * 16 + 1)
    total = weights + norms + convolutions
    assert held(report, "optimizer_state") == 2 * total
    assert held(report, "parameters") == total + norms + 4 * 8, "with running statistics and counters"


def test_experts_get_the_part_of_the_tokens_that_is_assumed(tmp_path):
    for fraction, rows in ((1.0, 8192), (0.125, 1024)):
        report = run("moe.py", tmp_path=tmp_path, steps=2, nonzero_fraction=fraction)
        hidden = 8 * rows * 1024 * 4 * 2  # each expert keeps its hidden layer before and after GELU
        tokens = 8 * rows * 256 * 4 * 3  # the tokens that it got, its output, and the product with the weights
        losses = 3 * 4096 * 256 * 4  # the last loss and the new one, whose storages keep all elements, and a buffer
        found = held(report, "activations") + held(report, "temporaries")
        assert found == pytest.approx(hidden + tokens + losses, rel=0.1)
        assert "selects" in report.assumptions[0] and "moe.py:22" in report.assumptions[0]
        example = example_of_simulation(report.simulation, load_profile("a100_40gb"))
        assert example.assumed == (fraction < 1), "all places are a bound, a part of them is a guess"


def test_packed_sequences_keep_their_lengths(tmp_path):
    report = run("packed_rnn.py", tmp_path=tmp_path, steps=6)
    assert len({step.shapes for step in report.steps}) > 3, "batches of different lengths"
    assert all(len(step.shapes) == 2 for step in report.steps)
    parameters = 5000 * 128 + 512 * 17 + 17
    for inputs in (128, 512):
        parameters += 2 * (4 * 256 * inputs + 4 * 256 * 256 + 2 * 4 * 256)
    assert held(report, "optimizer_state") == 4 * parameters
    assert not any("int64" in item for item in report.assumptions), "all lengths are known"


def test_diffusion_draws_time_steps_that_are_in_range(tmp_path):
    report = run("diffusion.py", tmp_path=tmp_path, steps=3)
    assert not any("int64" in item for item in report.assumptions)
    parameters = 1000 * 128 + 3 * 64 * 9 + 64 + 64 * 128 * 9 + 128 + 128 * 64 * 4 + 64 + 64 * 3 * 9 + 3
    parameters += sum(n * n * 9 + n + 2 * n + 128 * n + n for n in (64, 128, 64))
    assert held(report, "optimizer_state") == 8 * parameters
    assert held(report, "parameters") >= 2 * 4 * parameters, "the network and its average"


def test_two_towers_read_their_temperature(tmp_path):
    report = run("contrastive.py", tmp_path=tmp_path, steps=3)
    assert report.simulation.peaks["a100_40gb"].bounded.status == "ok" and len(report.steps) == 3
    assert report.steps[0].shapes == ((64, 3, 64, 64), (64, 32), (64, 32))
    layer = 4 * 128 * 128 + 4 * 128 + 2 * 128 * 512 + 512 + 128 + 4 * 128  # attention, feed-forward, two norms
    image = 3 * 64 * 8 * 8 + 64 + 64 * 64 * 256 + 256
    parameters = image + 1000 * 128 + 2 * layer + 128 * 256 + 256 + 1  # and the temperature
    assert held(report, "parameters") == held(report, "gradients") == 4 * parameters
    assert held(report, "optimizer_state") == 8 * parameters, "the temperature has its averages, too"
    assert held(report, "inputs") == 64 * (4 * 3 * 64 * 64 + 8 * 32 + 32), "images, tokens and the mask"
    hidden = 2 * 4 * 64 * 32 * 512 * 3  # of both layers: before and after ReLU, and after dropout
    assert held(report, "activations") > hidden


def test_reinforcement_learning_passes_the_checks_of_distributions(tmp_path):
    report = run("reinforcement.py", tmp_path=tmp_path)
    assert report.ending in ("the script ended", "stopped after 5 optimizer steps: no new peak in the last 3")
    parameters = 8 * 512 + 512 + 512 * 512 + 512 + 512 * 4 + 4 + 512 * 2 + 2
    assert held(report, "optimizer_state") == 4 * parameters, "RMSprop keeps one average"


def test_timm_trains_with_an_average_and_mixup(tmp_path):
    report = run("timm_ema_mixup.py", needs=("timm",), tmp_path=tmp_path)
    parameters = 11_176_512 + 512 * 100 + 100
    assert held(report, "optimizer_state") >= 8 * parameters, "LAMB keeps two averages"
    # a copy of the weights that has not run by then counts as activations
    copies = held(report, "parameters") + held(report, "activations")
    assert held(report, "parameters") >= 4 * parameters and copies >= 8 * parameters, "the network and its average"
    assert report.simulation.training.autocast == "fp16"


def test_a_detector_crops_all_regions(tmp_path):
    report = run("detection.py", needs=("torchvision",), tmp_path=tmp_path, steps=2)
    crops = 4 * 512 * 1280 * 7 * 7 * 4  # of 4 images, 512 regions each
    hidden = 2 * 4 * 512 * 1024 * 4
    assert held(report, "activations") > crops + hidden
    parameters = 2_223_872 + (1280 * 1280 * 9 + 1280) + 9 * (1280 + 1) + 36 * (1280 + 1)
    parameters += 1280 * 49 * 1024 + 1024 + 1024 * 1024 + 1024 + 5 * 1025 + 20 * 1025
    assert held(report, "optimizer_state") == 4 * parameters, "SGD with momentum"
    assert any("non-maximum suppression keeps 100%" in item for item in report.assumptions)


def test_keras_on_torch_counts_its_own_optimizer(tmp_path):
    report = run("keras_vgg.py", needs=("keras",), tmp_path=tmp_path, steps=6)
    parameters = 14_714_688 + 2 * (64 + 128 + 256 + 512 + 512)
    parameters += 2 * 2 * 512 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert held(report, "optimizer_state") == pytest.approx(8 * parameters, abs=64), "Adam, its count and its rate"
    assert held(report, "gradients") == 4 * parameters
    assert len(report.steps) == 6 and report.steps[0].shapes == ((32, 64, 64, 3),)
    assert report.simulation.training.optimizer == "Adam"


def trainer(*flags, tmp_path, **options):
    return run("hf_trainer.py", *flags, needs=("transformers", "accelerate"), tmp_path=tmp_path, **options)


def gpt2_parameters():
    """GPT-2 with 6 layers of 512 and 1,003 tokens."""
    return 1003 * 512 + 1024 * 512 + 6 * (12 * 512 * 512 + 13 * 512) + 2 * 512


def test_the_trainer_frees_its_output_before_the_step(tmp_path):
    report = trainer("--fixed", tmp_path=tmp_path, steps=3)
    assert held(report, "parameters") == pytest.approx(4 * gpt2_parameters(), rel=0.001)
    assert held(report, "optimizer_state") == 8 * gpt2_parameters() + 76 * 4, "fused: step counts are on the device"
    by_phase = {item.phase: item.allocated_bytes for item in report.phases}
    optimizer = 16 * gpt2_parameters()  # weights, gradients and two averages
    assert by_phase["optimizer"] == pytest.approx(optimizer + 2 * 8_519_680, rel=0.05), "no activations"
    assert report.steps[0].shapes[0] == (8, 128)


def test_the_trainer_checkpoints_accumulates_evaluates_and_saves(tmp_path):
    (tmp_path / "out" / "checkpoint-2").mkdir(parents=True)
    real = tmp_path / "out" / "checkpoint-2" / "model.safetensors"
    real.write_bytes(b"a real checkpoint")
    flags = ("--fixed", "--bf16", "--checkpointing", "--accumulate", "2", "--evaluate", "--save-steps", "2")
    report = trainer(*flags, tmp_path=tmp_path, steps=5)
    assert real.read_bytes() == b"a real checkpoint"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    assert "evaluation" in {item.phase for item in report.phases} and report.simulation.training.accumulate == 2
    plain = trainer("--fixed", "--bf16", tmp_path=tmp_path, steps=3)
    assert peaks(report)[0] < 0.75 * peaks(plain)[0], "blocks are recomputed"


def test_varying_lengths_need_more_than_three_steps(tmp_path):
    report = trainer("--count", "400", tmp_path=tmp_path)
    assert len(report.steps) > 25 and len({step.shapes for step in report.steps}) > 10
    first, steady = report.first_step, report.steady_step
    assert steady.allocated_bytes > 1.02 * first.allocated_bytes
    assert peaks(report)[0] == max(step.allocated_bytes for step in report.steps) / MIB


def test_lightning_runs_on_one_gpu(tmp_path):
    for precision, autocast in (("bf16-mixed", "bf16"), ("16-mixed", "fp16")):
        report = run("lightning_fit.py", precision, needs=("lightning", "torchmetrics"), tmp_path=tmp_path)
        expected = classified(meta_net(), images, batch_size=64, optimizer="AdamW", autocast=autocast)
        assert peaks(report)[0] == pytest.approx(expected[0], rel=0.005)
        assert report.simulation.training.autocast == autocast
        assert {"optimizer", "evaluation"} <= {item.phase for item in report.phases}
        assert not list(tmp_path.glob("lit/*.ckpt")), "checkpoints without data are not written"


def test_accelerate_finds_the_batch_that_fits(tmp_path):
    report = run("accelerate_batch_size.py", needs=("accelerate",), device="rtx_3060", tmp_path=tmp_path, steps=3)
    assert report.survived_ooms == 1 and not report.ran_out_of_memory
    batch = int(0.9 * 4096)  # accelerate tries a tenth less
    assert report.steps[0].shapes == ((batch, 3, 64, 64),) and report.simulation.training.batch_size == batch


def test_accelerate_launch_sets_the_precision_and_the_processes(tmp_path):
    launch = [interpreter_for("accelerate"), "-m", "accelerate.commands.launch"]
    weights = 4 * (2 * 1024 * 4096 + 4096 + 1024)

    def launched(*flags, **options):
        command = [*launch, *flags]
        return run("accelerate_launched.py", "--lr", "3e-4", command=command, tmp_path=tmp_path, steps=3, **options)

    one = launched("--mixed_precision", "bf16")
    assert one.simulation.training.autocast == "bf16"
    assert held(one, "optimizer_state") == 3 * weights, "two averages, and the denominators of the step"
    two = launched("--num_processes", "2", rank=1)
    assert two.simulation.training.autocast is None
    by_phase = {item.phase: item.allocated_bytes for item in two.phases}
    workspaces = 2 * 8_519_680  # of cuBLAS, forward and backward
    assert by_phase["optimizer"] == pytest.approx(6 * weights + workspaces, rel=0.01), "with the buckets of DDP"


LLAMA = 2 * 1003 * 512 + 6 * (512 * 512 * 2 + 2 * 512 * 256 + 3 * 512 * 1376 + 2 * 512) + 512
"""Parameters of the small Llama: 6 layers, 8 heads, 4 of keys and values."""


def test_lora_trains_adapters_alone(tmp_path):
    report = run("peft_lora.py", needs=("peft", "transformers", "accelerate"), tmp_path=tmp_path, steps=4)
    adapters = 6 * 16 * (4 * 512 + 512 + 256 + 512 + 256 + 2 * 512 - 512)
    assert held(report, "optimizer_state") == pytest.approx(8 * adapters, rel=0.2)
    assert held(report, "parameters") == pytest.approx(2 * LLAMA + 4 * adapters, rel=0.02)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").rglob("*.safetensors"))


def test_supervised_fine_tuning_packs_samples(tmp_path):
    report = run("trl_sft.py", needs=("trl", "peft", "datasets"), tmp_path=tmp_path, steps=3)
    adapters = 6 * 16 * (512 + 512 + 512 + 256)
    assert held(report, "optimizer_state") == pytest.approx(8 * adapters, rel=0.01)
    assert held(report, "parameters") == pytest.approx(2 * LLAMA + 4 * adapters, rel=0.02)


def test_a_quantised_base_is_loaded_from_a_config_alone(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376,
        "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1003,
        "pad_token_id": 1001, "bos_token_id": 0, "eos_token_id": 1002, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    report = run("qlora.py", str(folder), needs=("bitsandbytes", "peft", "accelerate"), tmp_path=tmp_path, steps=3)
    linear = LLAMA - 2 * 1003 * 512 - 13 * 512
    base = linear * 4.127 / 8 + 2 * (LLAMA - linear)  # nf4 with double quantisation, the rest in bf16
    by_phase = {item.phase: item.allocated_bytes for item in report.phases}
    adapters = 6 * 16 * (512 + 512 + 512 + 256)
    upcast = 2 * (LLAMA - linear)  # prepare_model_for_kbit_training casts what is not quantised to fp32
    assert by_phase["loading"] == pytest.approx(base + upcast + 4 * adapters, rel=0.1)
    assert held(report, "optimizer_state") < 3 * adapters, "two states of a byte each, and their scales"
    assert any("has no weights" in item for item in report.assumptions)


def test_layers_in_int8_take_a_byte_a_weight_and_pass_gradients(tmp_path):
    report = run("int8_base.py", needs=("bitsandbytes",), tmp_path=tmp_path, steps=3)
    width, batch = 1024, 256
    trained = 2 * (width * width + width + 10 * width + 10)
    base = 4 * (width * width + 4 * width)  # int8, and a scale for each row
    by_phase = {item.phase: item.allocated_bytes for item in report.phases}
    loading = trained + base + 2 * width * width  # the last layer in 16 bits, for a moment
    assert by_phase["loading"] == pytest.approx(loading, rel=0.01)
    inputs = 2 * batch * width
    assert by_phase["backward"] > trained + base + 5 * inputs, "each layer keeps its input or its output"


def test_mistral_7b_takes_what_was_measured_on_an_a100(tmp_path):
    report = run(
        "mistral_trainer.py", needs=("transformers", "accelerate"), device="a100_80gb", tmp_path=tmp_path,
        memory_mib=4096,
    )  # fmt: skip
    allocated, _ = peaks(report, "a100_80gb")
    assert allocated == pytest.approx(69_079, rel=0.005), "fms-acceleration, full fine-tuning, batch 4 x 4,096"
