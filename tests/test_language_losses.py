"""Forms of the loss of language models: the same value as the network's own, and bytes by hand."""

import importlib.util
import inspect
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from vramcast.commands.classify.classify_command import main
from vramcast.dataset_builder.backends.cuda.training_run import training_run
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.emit import emit
from vramcast.jobs.families import make_spec
from vramcast.jobs.families.keyword_inputs import KeywordInputs
from vramcast.jobs.language_losses import use_loss_form
from vramcast.jobs.liger_library import _network_of, liger_kernels
from vramcast.jobs.script_spec import ScriptSpecJob
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.training.setup import TrainingSetup, check_trained_whole

transformers = pytest.importorskip("transformers")
A100 = load_profile("a100_40gb")
HIDDEN, VOCABULARY, LENGTH, BATCH = 256, 32768, 512, 2
TINY = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY}  # fmt: skip
ROWS = BATCH * LENGTH
needs_liger = pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")


@pytest.fixture(scope="module")
def simulator():
    request = BuildRequest(
        target=parse_target("hf:llama-7b"), arguments=TINY, inputs=(str(LENGTH),), inputs_factory=None,
        step_factory=None, packed=True, keep_output=False, directory=".", python=None,
    )  # fmt: skip
    return Simulator(build_job(request))


def peak(simulator, **options):
    options = {"batch_size": BATCH, "dtype": "bf16", "optimizer": "adamw_torch_fused", **options}
    simulation = simulator.simulate(options, [A100])
    return simulation.peaks[A100.name].unbounded.allocated_bytes


@pytest.mark.parametrize("form", ["upcast", "chunked=8", "chunked=3"])
def test_a_form_computes_the_loss_of_the_network(form):
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "vocab_size": 100}))
    tokens = torch.randint(100, (2, 20))
    labels = tokens.masked_fill(tokens < 30, -100)
    expected = network(input_ids=tokens, labels=labels).loss
    use_loss_form(network, form)
    assert network(input_ids=tokens, labels=labels).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("form", ["upcast", "chunked=3"])
@pytest.mark.parametrize(
    ("name", "scale"),
    [("Granite", {"logits_scaling": 8.0}), ("Cohere", {"logit_scale": 0.0625}), ("Gemma2", {"head_dim": 64})],
)
def test_logits_are_scaled_as_the_network_does(form, name, scale):
    config = getattr(transformers, f"{name}Config")(**{**TINY, "vocab_size": 100, "pad_token_id": 0, **scale})
    network = getattr(transformers, f"{name}ForCausalLM")(config)
    torch.nn.init.normal_(network.get_output_embeddings().weight)  # logits far from zero, where a scale matters
    tokens = torch.randint(100, (2, 20))
    expected = network(tokens, labels=tokens).loss.item()
    use_loss_form(network, form)
    assert network(tokens, labels=tokens).loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("form", ["upcast", "chunked=3"])
def test_a_form_takes_the_arguments_of_the_network(form):
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, "vocab_size": 100}))
    tokens = torch.randint(100, (2, 20))
    expected = network(tokens, torch.ones_like(tokens), labels=tokens)[0].item()
    use_loss_form(network, form)
    assert network(tokens, torch.ones_like(tokens), labels=tokens, use_cache=False)[0].item() == pytest.approx(expected)
    loss, _ = network(tokens, labels=tokens, return_dict=False)
    assert loss.item() == pytest.approx(expected)
    with pytest.raises(UserError, match="labels in each call of LlamaForCausalLM beside loss_form"):
        network(tokens)


OWN_FILE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = LlamaForCausalLM(LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=500))

    def forward(self, tokens):
        return self.inner(tokens).logits
"""


def test_a_file_without_labels_is_refused_in_one_sentence(tmp_path, capfd):
    (tmp_path / "own.py").write_text(OWN_FILE)
    arguments = [f"{tmp_path / 'own.py'}:Network", "--input", "16:500", "--batch-size", "2", "--loss-form", "chunked"]
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert "labels in each call of LlamaForCausalLM" in error and "Traceback" not in error


def test_chunks_are_cast_one_at_a_time(simulator):
    logits = ROWS * VOCABULARY
    # Whole: at the peak of the backward pass the softmax and two gradients, all in fp32. Chunks: at the end of the
    # forward pass all logits in bf16, the softmax of all in fp32, and the last of eight chunks in fp32.
    whole, chunked = 3 * 4, 2 + 4 + 4 / 8
    assert peak(simulator) - peak(simulator, loss_form="chunked") == pytest.approx(logits * (whole - chunked), rel=0.02)
    assert peak(simulator, loss_form="upcast") == pytest.approx(peak(simulator), rel=0.01)


def test_the_fused_form_is_a_kernel_of_liger():
    setup = TrainingSetup(batch_size=1, loss_form="fused")
    assert (setup.loss_form, setup.liger) == ("default", "fused_linear_cross_entropy")
    assert TrainingSetup(batch_size=1, loss_form="fused", liger=True).liger is True
    assert TrainingSetup(batch_size=1, loss_form="fused", liger="rope").liger == "fused_linear_cross_entropy,rope"
    assert TrainingSetup(batch_size=1, loss_form="chunked").loss_form == "chunked=8"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_form": "chunked=0"}, "chunked=N"),
        ({"loss_form": ["chunked"]}, "chunked=N"),
        ({"liger": "rope,"}, "names of its kernels"),
        ({"liger": True, "loss_form": "chunked"}, "leave one out"),
        ({"liger": True, "parallel": "ddp(world_size=2)"}, "one GPU"),
    ],
)
def test_a_wrong_form_is_refused(options, match):
    with pytest.raises(UserError, match=match):
        TrainingSetup(batch_size=1, **options)


def test_a_layer_table_cannot_follow_another_loss():
    for options in ({"liger": True}, {"loss_form": "chunked"}, {"checkpointing": "every=2"}):
        with pytest.raises(UserError, match="layer table"):
            check_trained_whole(TrainingSetup(batch_size=1, **options))


def test_a_network_without_logits_has_no_other_form():
    with pytest.raises(UserError, match="causal language model"):
        use_loss_form(nn.Linear(2, 2), "chunked=8")
    with pytest.raises(UserError, match="found Linear"):
        use_loss_form(KeywordInputs(nn.Linear(2, 2), ["input"]), "chunked=8")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"checkpointing": "every=2"}, "found checkpointing=every=2"),
        ({"loss_form": "upcast"}, "found loss_form=upcast"),
        ({"liger": "rope"}, "found liger=rope"),
        ({"parallel": "ddp(world_size=2)", "adapter": "ia3"}, r"found parallel=ddp\(world_size=2\), adapter=ia3"),
    ],
)
def test_a_refusal_names_the_option_that_caused_it(options, named):
    network = {"arch": "uniform", "input_features": 8, "output_features": 2, "depth": 3}
    spec = make_spec("mlp", network, TrainingSetup(batch_size=2, **options))
    with pytest.raises(UserError, match=named):
        emit(spec)
    with pytest.raises(UserError, match=named):
        next(training_run(spec, 1, "cpu"))
    job = ScriptSpecJob.__new__(ScriptSpecJob)  # without the network of a script
    job.spec = replace(spec, network={"name": "a script"}, training=TrainingSetup(batch_size=2))
    with pytest.raises(UserError, match=named):
        job.setup(options)


LIBRARY = """
from transformers.models.llama import modeling_llama


def apply_liger_kernel_to_llama(rope=True, rms_norm=True, model=None):
    if rope:
        modeling_llama.apply_rotary_pos_emb = None
    if rms_norm:
        modeling_llama.LlamaRMSNorm.forward = None


MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package with the functions of Liger-Kernel that are called, for environments that lack it."""
    home = tmp_path / "liger_kernel" / "transformers"
    home.mkdir(parents=True)
    (tmp_path / "liger_kernel" / "__init__.py").touch()
    (home / "__init__.py").touch()
    (home / "monkey_patch.py").write_text(LIBRARY)
    metadata = tmp_path / "liger_kernel-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: liger_kernel\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def tiny_llama():
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def test_what_liger_replaces_in_transformers_is_restored(library):
    from transformers.models.llama import modeling_llama as home

    rotate, norm = home.apply_rotary_pos_emb, home.LlamaRMSNorm.forward
    with liger_kernels(nn.Sequential(tiny_llama()), True) as versions:
        assert home.apply_rotary_pos_emb is None and home.LlamaRMSNorm.forward is None
        assert versions == {"liger_kernel": "9.9"}
    assert home.apply_rotary_pos_emb is rotate and home.LlamaRMSNorm.forward is norm
    with liger_kernels(tiny_llama(), "rms_norm"):
        assert home.apply_rotary_pos_emb is rotate and home.LlamaRMSNorm.forward is None


def test_kernels_are_left_out_of_the_default_ones_by_no(library):
    from transformers.models.llama import modeling_llama as home

    rotate = home.apply_rotary_pos_emb
    with liger_kernels(tiny_llama(), "default,geglu,no_rope"):  # geglu is a kernel of other networks
        assert home.apply_rotary_pos_emb is rotate and home.LlamaRMSNorm.forward is None
    assert TrainingSetup(batch_size=1, liger="no_rope").liger == "default,no_rope"
    assert TrainingSetup(batch_size=1, liger="default").liger is True
    with pytest.raises(UserError, match="leave one out"):
        TrainingSetup(batch_size=1, liger="no_fused_linear_cross_entropy", loss_form="fused")


def test_the_network_inside_of_an_adapter_gets_the_kernels(library):
    peft = pytest.importorskip("peft")
    network = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]), low_cpu_mem_usage=True)
    assert type(_network_of(network)).__name__ == "LlamaForCausalLM"


def test_networks_and_kernels_that_liger_lacks_are_refused(library):
    for kernels in ("swish", "default,no_swish"):
        with pytest.raises(UserError, match="swish"), liger_kernels(tiny_llama(), kernels):
            pass
    with pytest.raises(UserError, match="network of transformers"), liger_kernels(nn.Linear(2, 2), True):
        pass
    with torch.device("meta"):
        other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
    with pytest.raises(UserError, match="the type gpt2"), liger_kernels(other, True):
        pass


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_an_absent_library_is_named_with_the_command_that_installs_it(simulator):
    with pytest.raises(UserError, match="pip install --no-deps liger-kernel"):
        peak(simulator, liger=True)


@needs_liger
def test_the_fused_loss_allocates_gradients_and_one_chunk_of_logits():
    with CudaEmulation(A100):
        import liger_kernel.ops.fused_linear_cross_entropy
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        target = torch.zeros(ROWS, dtype=torch.long, device="cuda")
        (x @ weight.t()[:, :8]).sum().backward()  # cuBLAS holds its workspaces
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        LigerFusedLinearCrossEntropyLoss()(weight, x, target)
        chunk = 8  # the power of two that is not below 1024 / (32768 / 256)
        expected = 2 * (x.numel() + weight.numel() + chunk * VOCABULARY)
        if "out=grad_weight" not in inspect.getsource(liger_kernel.ops.fused_linear_cross_entropy):
            expected += (2 + 4) * weight.numel()  # Liger 0.8.0 adds a copy in bf16 and one in fp32, 0.8.5 none
        small = ROWS * (4 + 1) + 8192  # losses, and which targets count
        assert expected <= torch.cuda.max_memory_allocated() - before <= expected + small


@needs_liger
def test_liger_on_a_network_never_holds_the_logits(simulator):
    logits = ROWS * VOCABULARY * 4
    assert peak(simulator) - peak(simulator, loss_form="fused") > 2 * logits


def test_requests_of_the_service_have_the_same_options():
    pytest.importorskip("pydantic")
    from pydantic import ValidationError

    from vramcast.collocation.service.requests import TrainingBody

    body = TrainingBody(batch_size=4, checkpointing="every=2", liger="rope")
    assert TrainingSetup(**body.model_dump()).checkpointing == "every=2"
    assert TrainingBody(batch_size=4, checkpointing=True).checkpointing is True
    schema = TrainingBody.model_json_schema()["properties"]["checkpointing"]["anyOf"]
    assert {item["type"] for item in schema} == {"boolean", "string"}
    with pytest.raises(ValidationError):
        TrainingBody(batch_size=4, checkpointing=7)
