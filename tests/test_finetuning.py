"""Adapters of peft, quantised bases and the optimizers of fine-tuning; peft runs in an interpreter that has it."""

import json

import pytest
import torch
from torch import nn

from tests.support.script_runs import interpreter_for
from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.request import ClassifyRequest
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.finetuning.packed_linears import awq_linear, gptq_linear
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.optimizers import parse_optimizer
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.sandbox.client import ChildSimulator
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.training.setup import TrainingSetup, adapter_text, quantization_text, with_shorthands

LORA = "lora:r=8,targets=q_proj,v_proj"
HIDDEN, INNER, LAYERS, VOCABULARY = 256, 512, 2, 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
}  # fmt: skip
LINEAR = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
WHOLE = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
"""Parameters outside of the linear layers that are quantised: embeddings, output, norms."""
DEVICE = "a100_40gb"


@pytest.fixture(scope="module")
def simulator(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(CONFIG))
    python = interpreter_for("peft", "transformers")
    request = BuildRequest(target=parse_target(f"hf:{path}"), inputs=("64",), python=python)
    with ChildSimulator(request) as child:
        yield child


def simulated(simulator, **options):
    setup = {"batch_size": 4, "dtype": "bf16", **options}
    return simulator.simulate(setup, [load_profile(DEVICE)])


def used(simulation):
    return simulation.peaks[DEVICE].unbounded.breakdown


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("lora", "lora"),
        ("LoRA:r=16,targets=v_proj,q_proj", "lora(r=16, target_modules=['q_proj', 'v_proj'])"),
        ("lora(r=16, target_modules=['q_proj'])", "lora(r=16, target_modules=['q_proj'])"),
        ("lora:rank=4,alpha=8,dropout=0.1,targets=all-linear",
         "lora(lora_alpha=8, lora_dropout=0.1, r=4, target_modules='all-linear')"),
        ("p-tuning:tokens=10", "p_tuning(num_virtual_tokens=10)"),
        ("dora:use_rslora=true", "dora(use_rslora=True)"),
    ],
)  # fmt: skip
def test_equal_adapters_have_one_text(text, canonical):
    assert adapter_text(text) == canonical
    assert adapter_text(canonical) == canonical


@pytest.mark.parametrize("text", ["lora:16", "lora:r=8,rank=8", "lo ra", "lora(r=)"])
def test_a_wrong_adapter_is_one_sentence(text):
    with pytest.raises(UserError, match="expected"):
        adapter_text(text)


def test_quantised_weights_are_checked():
    assert quantization_text("NF4-dq") == "nf4_dq"
    assert quantization_text("gptq(group_size=64)") == "gptq(group_size=64)"
    for text, words in (("nf5", "nf4"), ("torchao-int4", "no backward pass"), ("nf4(bits=4)", "blocksize")):
        with pytest.raises(UserError, match=words):
            quantization_text(text)
    with pytest.raises(UserError, match="cannot be trained"):
        TrainingSetup(batch_size=1, quantize="nf4")


def test_the_short_option_is_the_adapter():
    values = {"target": "hf:gpt2", "batch_size": 2, "lora": "r=4,targets=c_attn", "quantize": "nf4"}
    options = ClassifyRequest.of(values).options
    assert options["adapter"] == "lora(r=4, target_modules=['c_attn'])" and options["quantize"] == "nf4"
    assert with_shorthands({"lora": True}) == {"adapter": "lora"}
    with pytest.raises(UserError, match="found both"):
        with_shorthands({"lora": "r=4", "adapter": "ia3"})


def test_lora_trains_its_matrices_alone_in_fp32(simulator):
    memory = used(simulated(simulator, adapter=LORA))
    adapter = LAYERS * 2 * (8 * HIDDEN + 8 * HIDDEN)
    base = 2 * (LINEAR + WHOLE)
    assert memory["parameters"] == pytest.approx(base + 4 * adapter, rel=0.001)  # and rotary frequencies
    assert memory["optimizer_state"] == pytest.approx(2 * 4 * adapter, rel=0.01)


def test_lora_in_the_dtype_of_its_base(simulator):
    cast = used(simulated(simulator, adapter=LORA))
    kept = used(simulated(simulator, adapter=f"{LORA},autocast_adapter_dtype=False"))
    assert kept["optimizer_state"] == cast["optimizer_state"] / 2


@pytest.mark.parametrize(
    "text", ["dora:r=8,targets=q_proj", "adalora:targets=q_proj", "ia3", "prompt", "prefix", "p-tuning"]
)
def test_types_of_peft_are_traced(simulator, text):
    simulation = simulated(simulator, adapter=text)
    memory = used(simulation)
    assert 0 < memory["optimizer_state"] < 0.3 * memory["parameters"]
    assert simulation.traced_with["peft"]


def test_saved_modules_and_adapters_on_embeddings(simulator):
    saved = used(simulated(simulator, adapter="lora:r=8,targets=q_proj,modules_to_save=lm_head"))
    embedded = used(simulated(simulator, adapter="lora:r=8,targets=q_proj,embed_tokens"))
    plain = used(simulated(simulator, adapter="lora:r=8,targets=q_proj"))
    head, embedding = 2 * 2 * VOCABULARY * HIDDEN, 2 * 4 * 8 * (VOCABULARY + HIDDEN)  # a saved module stays in bf16
    assert saved["optimizer_state"] - plain["optimizer_state"] == pytest.approx(head, rel=0.01)
    added = embedded["optimizer_state"] - plain["optimizer_state"]
    assert added == pytest.approx(embedding, rel=0.01)


@pytest.mark.parametrize(
    ("form", "bytes_of_weight", "rest"),
    [
        ("nf4", 0.5 + 4 / 64, 4), ("fp4", 0.5 + 4 / 64, 4), ("nf4_dq", 0.5 + 1 / 64 + 4 / 64 / 256, 4),
        ("nf4(upcast=False)", 0.5 + 4 / 64, 2), ("int8", 1 + 4 / HIDDEN, 4), ("gptq", 0.5 + (2 + 0.5) / 128, 2),
        ("awq", 0.5 + (2 + 0.5) / 128, 2), ("torchao_int8", 1 + 5 / HIDDEN, 2),
    ],
)  # fmt: skip
def test_a_quantised_base_has_the_bytes_of_its_library(simulator, form, bytes_of_weight, rest):
    library = {"int8": "bitsandbytes", "torchao_int8": "torchao"}.get(form, "bitsandbytes" if "4" in form else "peft")
    interpreter_for("peft", "transformers", library)
    memory = used(simulated(simulator, adapter=LORA, quantize=form))
    adapter = 4 * LAYERS * 2 * 2 * 8 * HIDDEN
    expected = bytes_of_weight * LINEAR + rest * WHOLE + adapter
    assert memory["parameters"] == pytest.approx(expected, rel=0.02)


TWO_LAYERS = """
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(1024, 1024, bias=False) for _ in range(2))
        self.out = nn.Linear(1024, 16, bias=False)

    def forward(self, inputs):
        return self.out(self.b(self.a(inputs)))
"""
WEIGHT = INPUT = 2
"""MiB of a weight in 16 bits, and of a batch of 8 x 64 inputs in fp32; half as much in 16 bits."""
TENSORS_AT_PEAK = {
    # second layer, backward: inputs; gradients of output, adapter's input and input; dequantised weight
    "nf4": INPUT / 2 + 3 * INPUT / 2 + WEIGHT, "fp4": INPUT / 2 + 3 * INPUT / 2 + WEIGHT,
    "nf4_dq": INPUT / 2 + 3 * INPUT / 2 + WEIGHT,
    # second layer, forward, adapters in fp32: inputs of the network and of the layer; those of both adapters in fp32;
    # the product; the output of the adapter, and scaled
    "gptq": 2 * INPUT / 2 + 2 * INPUT + INPUT / 2 + 2 * INPUT,
    # the same, and the input of the step before, which the library's context holds as long as its output lives
    "int8": 2 * INPUT / 2 + 2 * INPUT + INPUT / 2 + 2 * INPUT + INPUT / 2,
    # the same with an adapter in bf16, which keeps the layer's own input; and the dequantised weight
    "torchao_int8": 2 * INPUT / 2 + INPUT / 2 + 2 * INPUT / 2 + WEIGHT,
    # second layer, backward: inputs; input of the first adapter; fp16 input; gradient, in fp16 too; weight, 8 times too
    "awq": INPUT / 2 + INPUT + INPUT / 2 + 2 * INPUT / 2 + 9 * WEIGHT,
}  # fmt: skip


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "network.py"
    path.write_text(TWO_LAYERS)
    python = interpreter_for("peft", "transformers")
    request = BuildRequest(target=parse_target(f"{path}:Network"), inputs=("64,1024",), python=python)
    with ChildSimulator(request) as child:
        yield child


@pytest.mark.parametrize("form", TENSORS_AT_PEAK)
def test_a_training_step_on_a_quantised_base(two_layers, form):
    library = {"gptq": "peft", "awq": "peft", "torchao_int8": "torchao"}.get(form, "bitsandbytes")
    interpreter_for("peft", "transformers", library)
    adapter = "lora:r=8,targets=a,b,autocast_adapter_dtype=False"
    options = {"batch_size": 8, "optimizer": "sgd", "adapter": adapter, "quantize": form}
    peak = simulated(two_layers, **options).peaks[DEVICE].unbounded
    tensors = peak.requested_bytes - peak.breakdown["parameters"] - peak.breakdown["workspace"]
    assert tensors / 2**20 == pytest.approx(TENSORS_AT_PEAK[form], abs=0.11)  # and the small tensors of rank 8


def test_adapters_that_read_weights_are_made_without_them(simulator):
    shira = used(simulated(simulator, adapter="shira:r=8,targets=q_proj,v_proj"))
    assert shira["optimizer_state"] == 2 * 4 * LAYERS * 2 * 8 * 2 * HIDDEN
    interpreter_for("peft", "transformers", "sklearn")
    adamss = used(simulated(simulator, adapter="adamss:r=16,num_subspaces=4,targets=q_proj,v_proj"))
    trained = LAYERS * 2 * (4 * 16 + HIDDEN)  # of rank 1: a row for each subspace, a column for all outputs
    assert adamss["optimizer_state"] == pytest.approx(2 * 4 * trained, rel=0.5)
    assert adamss["optimizer_state"] >= 2 * 4 * trained  # each of the small tensors has a block


def test_a_batch_of_one_has_no_padding_and_a_plain_loop_keeps_its_logits(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "vocab_size": 20_000}))
    peaks = {}
    for name in ("", "packed", "keep_output"):
        request = BuildRequest(target=parse_target(f"hf:{path}"), inputs=("128",), **({name: True} if name else {}))
        answers = [simulated(Simulator(build_job(request)), batch_size=size, optimizer="sgd") for size in (1, 2)]
        peaks[name] = [answer.peaks[DEVICE].unbounded.allocated_bytes for answer in answers]
    tokens_of_a_mask = 128 * 8
    assert abs(peaks[""][0] - peaks["packed"][0]) <= 2 * tokens_of_a_mask < peaks[""][1] - peaks["packed"][1]
    kept = [plain - freed for plain, freed in zip(peaks["keep_output"], peaks[""], strict=True)]
    assert kept[0] == pytest.approx(128 * 20_000 * 2, rel=0.05)  # logits in bf16
    assert kept[1] == pytest.approx(2 * kept[0], rel=0.05)


def test_errors_of_peft_are_one_sentence(simulator):
    with pytest.raises(UserError, match=r"expected an adapter of .*found 'lorra'"):
        simulated(simulator, adapter="lorra")
    with pytest.raises(UserError, match="unexpected keyword argument"):
        simulated(simulator, adapter="lora:depth=3")
    with pytest.raises(UserError, match="can add to LlamaForCausalLM"):
        simulated(simulator, adapter="lora:targets=query")


def test_packed_layers_have_the_storage_of_their_library():
    linear = nn.Linear(256, 512, bias=False, device="meta", dtype=torch.bfloat16)
    gptq, awq = gptq_linear(linear, {}, torch.bfloat16), awq_linear(linear, {}, torch.bfloat16)
    assert {name: tuple(item.shape) for name, item in gptq.named_buffers()} == {
        "qweight": (32, 512), "qzeros": (2, 64), "scales": (2, 512), "g_idx": (256,)
    }  # fmt: skip
    assert {name: tuple(item.shape) for name, item in awq.named_buffers()} == {
        "qweight": (256, 64), "qzeros": (2, 64), "scales": (2, 512)
    }  # fmt: skip
    for layer in (gptq, awq):
        inputs = torch.empty(2, 8, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
        output = layer(inputs)
        output.sum().backward()
        assert output.shape == (2, 8, 512) and output.dtype == torch.bfloat16
        assert inputs.grad.shape == inputs.shape
    with pytest.raises(UserError, match="bits of gptq"):
        gptq_linear(linear, {"bits": 5}, torch.bfloat16)


def dense(**options):
    network = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
    job = ModuleJob(network.to("meta"), lambda size: torch.empty(size, 1024, device="meta"))
    return used(Simulator(job).simulate({"batch_size": 2, **options}, [load_profile(DEVICE)]))


WEIGHTS = 8 * 1024 * 1024


@pytest.mark.parametrize(
    ("optimizer", "bytes_of_state"),
    [
        ("adamw_torch", 8), ("adamw_8bit", 2 + 2 * 4 / 256), ("lion_8bit", 1 + 4 / 256), ("paged_adamw_32bit", 0),
        ("paged_adamw_8bit", 2 * 4 / 256), ("adamw_torch_8bit", 2 + 2 * 4 / 256), ("adamw_torch_4bit", 1 + 2 * 4 / 128),
    ],
)  # fmt: skip
def test_optimizers_by_the_names_of_the_trainer(optimizer, bytes_of_state):
    memory = dense(optimizer=optimizer, implementation="fused" if optimizer == "adamw_torch" else "default")
    assert memory["optimizer_state"] == pytest.approx(bytes_of_state * WEIGHTS, rel=0.01, abs=2**15)


def test_an_optimizer_in_the_backward_pass_holds_one_gradient():
    usual, inside = dense(optimizer="sgd"), dense(optimizer="sgd", implementation="in_backward")
    total = {name: sum(value for use, value in memory.items() if use in ("gradients", "activations", "temporaries"))
             for name, memory in (("usual", usual), ("inside", inside))}  # fmt: skip
    assert total["usual"] > 4 * WEIGHTS  # a gradient for each weight
    assert total["inside"] < 4 * WEIGHTS / 4
    with pytest.raises(UserError, match="in_backward"):
        TrainingSetup(batch_size=2, implementation="in_backward", accumulate=2)


def test_unknown_arguments_of_an_optimizer_of_bitsandbytes():
    assert parse_optimizer("Paged_AdamW_8bit") == "PagedAdamW8bit"
    assert parse_optimizer("adamw_torch_fused") == "AdamW(fused=True)"
    with pytest.raises(UserError, match="found \\['depth'\\]"):
        parse_optimizer("adamw8bit(depth=3)")


def test_a_layer_table_takes_no_adapter(tmp_path):
    table = tmp_path / "table.json"
    table.write_text(
        json.dumps({"input_elements": 8, "layers": [{"kind": "Linear", "output_shape": [4], "parameters": 32}]})
    )
    assert main([str(table), "--batch-size", "4", "--lora", "--json"]) == 2
