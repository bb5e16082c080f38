"""Runs without training: forward passes, evaluation and generation, with caches counted independently."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.job_answers import JobAnswers
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.inference import inference_call
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.models.predictor import Predictor
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.training.setup import TrainingSetup

MIB = 2**20
_DEVICE = "rtx_4090"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
_WINDOW = 4
_MISTRAL = {**_LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": _WINDOW}
_MLA = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1024, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "first_k_dense_replace": 2,
}  # fmt: skip


def _job(tmp_path, config, length=64):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return build_job(BuildRequest(target=parse_target(f"hf:{path}"), inputs=(str(length),), packed=True))


def _peak(job, **options):
    simulation = Simulator(job).simulate(options, [load_profile(_DEVICE)])
    return simulation.peaks[_DEVICE].unbounded


def _held_bytes(job, **options):
    """Return the memory that one more sample of a generation holds at the peak, without what all samples share."""
    two, four = (_peak(job, batch_size=size, mode="generate", **options).allocated_bytes for size in (4, 8))
    return (four - two) / 4


def test_a_forward_pass_has_neither_gradients_nor_optimizer_state():
    network = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    job = ModuleJob(network.to("meta"), lambda size: torch.empty(size, 1024, device="meta"))
    peak = _peak(job, batch_size=1024, mode="inference")
    weights = sum(item.numel() * 4 for item in network.parameters())
    hidden, outer = 1024 * 4096 * 4, 1024 * 1024 * 4
    workspace = peak.breakdown["workspace"]
    assert peak.breakdown["gradients"] == peak.breakdown["optimizer_state"] == 0
    # the weights, the input, the old output, and both hidden maps while ReLU runs: nothing is kept for a backward pass
    assert peak.allocated_bytes == pytest.approx(weights + 2 * outer + 2 * hidden + workspace, abs=4096)


def test_evaluation_adds_the_loss_to_a_forward_pass(tmp_path):
    job = _job(tmp_path, {**_LLAMA, "vocab_size": 8192}, length=32)
    forward, evaluation = (_peak(job, batch_size=64, mode=mode).allocated_bytes for mode in ("inference", "evaluation"))
    logits = 64 * 32 * 8192 * 4
    assert evaluation - forward == pytest.approx(logits, rel=0.02)  # the logarithm of softmax; old logits are in both


def test_a_network_is_run_in_evaluation_mode_without_gradients():
    seen = []

    class Network(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().forward(x)

    job = ModuleJob(Network(8, 8, device="meta"), lambda size: torch.empty(size, 8, device="meta"))
    for mode in ("inference", "evaluation"):
        _peak(job, batch_size=2, mode=mode)
    assert (False, False, True) in seen
    assert (False, False, False) in seen
    assert not any(training or gradients for training, gradients, _ in seen)


@pytest.mark.parametrize(
    ("config", "cached"),
    [
        (_LLAMA, lambda tokens: 2 * 2 * tokens * (2 * 32) * 4),  # layers, keys and values, tokens, heads of keys
        (_MLA, lambda tokens: 2 * tokens * (64 + 16) * 4),  # latents and the rotated part of keys
    ],
    ids=["grouped-query", "latent attention"],
)
def test_a_cache_grows_by_the_keys_and_values_of_each_token(tmp_path, config, cached):
    """Longer generations differ by their caches and by what one layer copies while it grows."""
    job = _job(tmp_path, config, length=4)
    short, long = (_held_bytes(job, new_tokens=tokens) for tokens in (8, 16))
    expanded = 2 * 8 * 8 * 80 * 4  # of eight heads in one layer, at most
    # beside the cache of all layers: the cache of one layer before torch.cat, and heads that are expanded or padded
    assert cached(8) <= long - short <= cached(8) + 3 * expanded


def test_a_cache_of_a_sliding_window_ends_at_the_window(tmp_path):
    sliding = _job(tmp_path, _MISTRAL, length=4)
    short, long = (_held_bytes(sliding, new_tokens=tokens) for tokens in (2 * _WINDOW, 4 * _WINDOW))
    assert long - short <= 2 * _WINDOW * 2 * 8  # the tokens themselves, not their keys
    whole = _job(tmp_path, {**_MISTRAL, "sliding_window": None}, length=4)
    assert _held_bytes(whole, new_tokens=4 * _WINDOW) > long + 2 * 2 * 2 * _WINDOW * 2 * 32 * 4


def test_a_static_cache_is_allocated_whole(tmp_path):
    job = _job(tmp_path, _LLAMA, length=4)
    few, many = (_held_bytes(job, new_tokens=tokens, cache="static") for tokens in (8, 16))
    assert many - few >= 2 * 2 * 8 * 2 * 32 * 4
    simulation = Simulator(job).simulate(
        {"batch_size": 2, "mode": "generate", "new_tokens": 4, "cache": "static"}, [load_profile(_DEVICE)]
    )
    assert simulation.training.cache == "static"


def test_an_answer_of_inference_is_out_of_distribution_with_a_wider_margin():
    predictor = Predictor.load("universal")
    network = nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048))
    trained = predictor.classify(network, torch.empty(64, 2048), device=_DEVICE)
    inferred = predictor.classify(network, torch.empty(64, 2048), device=_DEVICE, mode="inference")
    assert inferred.out_of_distribution
    assert not trained.out_of_distribution
    assert inferred.estimate_mib < trained.estimate_mib
    assert inferred.safe_mib / inferred.estimate_mib > trained.safe_mib / trained.estimate_mib
    assert any("nothing is trained" in note for note in inferred.notes)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "inference", "optimizer": "adamw"}, "expected no optimizer beside mode=inference"),
        ({"mode": "evaluate"}, "expected mode to be one of"),
    ],
)
def test_a_request_that_mixes_modes_is_refused(values, words):
    with pytest.raises(UserError, match=words):
        ClassifyRequest.of({"target": "hf:gpt2", "batch_size": 1, **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"new_tokens": 8}, "expected mode=generate beside new_tokens=8"),
        ({"cache": "static", "mode": "inference"}, "expected mode=generate beside cache=static"),
        ({"mode": "generate"}, "expected new_tokens beside mode=generate"),
        ({"mode": "inference", "accumulate": 2}, "expected no accumulate=2 beside mode=inference"),
        ({"mode": "inference", "checkpointing": True}, "expected no checkpointing=True beside mode=inference"),
        ({"mode": "evaluation", "parallel": "ddp(world_size=2)"}, "expected no parallel=ddp"),
        ({"mode": "inference", "optimizer": "RMSprop"}, "expected no optimizer beside mode=inference"),
    ],
)
def test_a_setup_that_mixes_modes_is_refused(values, words):
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        TrainingSetup(batch_size=1, **values)


def test_a_network_that_cannot_generate_is_refused():
    setup = TrainingSetup(batch_size=1, mode="generate", new_tokens=4)
    with pytest.raises(UserError, match="expected a network with the generate method of transformers"):
        inference_call(nn.Linear(2, 2), setup, None)


def test_a_jobs_file_takes_the_fields_of_a_mode(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA))
    target = f"hf:{tmp_path / 'config.json'}"
    common = {"target": target, "batch_size": 4, "input": "8"}
    jobs = [
        {**common, "mode": "inference"},
        {**common, "mode": "generate", "new_tokens": 2, "cache": "static"},
        {**common, "mode": "inference", "optimizer": "sgd"},
    ]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, jobs)))
    assert main(["--json", "--jobs", str(tmp_path / "jobs.jsonl")]) == 2
    forward, generation, refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert forward["status"] == generation["status"] == "ok"
    assert forward["breakdown_mib"]["optimizer_state"] == forward["breakdown_mib"]["gradients"] == 0
    assert forward["out_of_distribution"]
    assert generation["out_of_distribution"]
    assert "expected no optimizer beside mode=inference" in refused["error"]


def test_the_largest_batch_of_inference_is_larger_than_that_of_training():
    def network():
        layers = [nn.Linear(8192, 8192, device="meta") for _ in range(8)]
        return ModuleJob(nn.Sequential(*layers), lambda size: torch.empty(size, 8192, device="meta"))

    predictor, largest = Predictor.load("universal"), {}
    for mode in ("training", "inference"):
        request = ClassifyRequest.of({"target": "net.py:make", "batch_size": 1, "mode": mode, "device": "rtx_4060"})
        job = JobAnswers(request, Simulator(network()), predictor)
        largest[mode] = job.largest_batch(job.answer("rtx_4060"))[0]
    free_bytes = load_profile("rtx_4060").available_bytes - 8 * 8192**2 * 4
    assert largest["inference"] > largest["training"]
    assert largest["inference"] * 8192 * 4 * 3 < free_bytes  # input, and the input and output of a layer


def test_an_adapter_and_quantised_weights_need_no_training(tmp_path):
    pytest.importorskip("peft")
    job = _job(tmp_path, {**_LLAMA, "hidden_size": 1024, "intermediate_size": 4096}, length=4)
    options = {"batch_size": 1, "mode": "inference", "dtype": "bf16"}
    plain = _peak(job, **options).breakdown["parameters"]
    adapted = _peak(job, adapter="lora:r=8,targets=q_proj", **options).breakdown["parameters"]
    assert adapted - plain == pytest.approx(2 * (1024 * 8 + 8 * 1024) * 4, rel=0.05)  # two layers, in fp32
    packed = _peak(job, quantize="gptq", **options).breakdown["parameters"]
    assert 0.25 * plain < packed < 0.4 * plain  # four bits, with scales; embeddings and head stay


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_mode_takes_the_kernels_of_cuda(context):
    with CudaEmulation(load_profile(_DEVICE)) as gpu, context():
        q = torch.empty(2, 4, 512, 64, dtype=torch.float16, device="cuda")
        before = gpu.memory.allocator.allocated_bytes
        torch.cuda.reset_peak_memory_stats()
        out = functional.scaled_dot_product_attention(q, q, q)
        scores = 2 * 4 * 512 * 512 * 2
        extra = torch.cuda.max_memory_allocated() - before
        assert out.numel() * 2 <= extra < out.numel() * 2 + 2**16 < scores, "flash attention has no scores"
