"""Denoising networks of diffusers: published numbers of parameters, inputs, a training step, folders with a config."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.script_runs import interpreter_for
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.diffusion_architectures import DENOISERS, find_denoiser
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.sandbox.client import ChildSimulator

DEVICE = "a100_40gb"
DIT_EMBEDDING = 1001 * 1152 + 256 * 1152 + 1152 * 1152 + 2 * 1152
PUBLISHED = {
    "sd15-unet": 859_520_964, "sdxl-unet": 2_567_463_684, "sd3": 2_028_328_000, "flux-dit": 11_901_408_320,
    # diffusers has an embedding of times and classes in each of 28 blocks, and positions are no parameter
    "dit-xl-2": 675_129_632 + 27 * DIT_EMBEDDING - 256 * 1152,
}  # fmt: skip
COUNT = """
import sys
from vramcast.jobs.families.external import build_external
from vramcast.jobs.diffusion_architectures import DENOISERS
for name in sys.argv[1:]:
    architecture, config = DENOISERS[name]
    module, _ = build_external("diffusers", {"architecture": architecture, "config": config})
    print(name, sum(item.numel() for item in module.parameters()))
"""
SMALL = {
    "_class_name": "UNet2DConditionModel", "_diffusers_version": "0.31.0", "sample_size": 16,
    "block_out_channels": [32, 64], "cross_attention_dim": 48, "norm_num_groups": 8, "attention_head_dim": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
}  # fmt: skip


def test_the_number_of_parameters_is_the_published_one():
    words = [interpreter_for("diffusers"), "-c", COUNT, *PUBLISHED]
    root = Path(__file__).parents[1]
    lines = subprocess.run(words, check=True, capture_output=True, text=True, cwd=root).stdout.splitlines()
    assert {line.split()[0]: int(line.split()[1]) for line in lines} == PUBLISHED


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def simulated(folder, libraries=("diffusers",), inputs=(), **options):
    python = interpreter_for(*libraries)
    request = BuildRequest(target=parse_target(f"diffusers:{folder}"), inputs=inputs, python=python)
    with ChildSimulator(request) as child:
        return child.simulate({"batch_size": 2, "dtype": "bf16", **options}, [load_profile(DEVICE)])


def test_a_folder_with_a_config_is_trained(folder):
    simulation = simulated(folder)
    peak = simulation.peaks[DEVICE].unbounded
    shapes = [item["shape"] for item in simulation.inputs]
    assert shapes == [[4, 16, 16], [], [77, 48], [80 - 6 * 8], [6]]
    parameters = 2 * sum(layer.parameters for layer in simulation.table.layers)
    assert peak.breakdown["parameters"] == pytest.approx(parameters, rel=0.01)
    assert simulation.traced_with["diffusers"]


def test_larger_latents_and_checkpointing(folder):
    plain, larger, recomputed = (
        simulated(folder, inputs=inputs, checkpointing=checkpointing).peaks[DEVICE].unbounded.allocated_bytes
        for inputs, checkpointing in (((), False), (("4,64,64",), False), (("4,64,64",), True))
    )
    assert plain < recomputed < larger


def test_lora_on_a_denoising_network(folder):
    simulation = simulated(folder, ("diffusers", "peft"), adapter="lora:r=4,targets=to_q,to_v")
    memory = simulation.peaks[DEVICE].unbounded.breakdown
    assert 0 < memory["optimizer_state"] < 0.1 * memory["parameters"]


def test_an_unknown_name_suggests_a_known_one():
    with pytest.raises(UserError, match="sdxl-unet"):
        find_denoiser("sdxl-unett")
    assert DENOISERS["flux-dit"][1]["guidance_embeds"]
