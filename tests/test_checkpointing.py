"""Forms of activation checkpointing: bytes by hand, and the same figures as scripts that call torch themselves."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.checkpointing import enable_checkpointing
from vramcast.jobs.families import make_spec
from vramcast.jobs.job import ModuleJob, SpecJob
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.training.checkpointing_forms import checkpointing_form
from vramcast.virtual_gpu.training.setup import TrainingSetup

A100 = load_profile("a100_40gb")
ROWS, WIDTH, BLOCKS = 16384, 64, 6
MLP = {"arch": "uniform", "input_features": 8, "output_features": 2, "depth": 3}
UNIT = ROWS * WIDTH * 4
"""Bytes of the output of a block. A block holds its input (one unit) and two tensors of four units inside."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class AttentionBlock(Block):
    def __init__(self):
        super().__init__()
        self.three, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        tokens = min(len(x), 128)
        # sequences, heads, three, tokens, width
        heads = self.three(x).view(-1, tokens, 3, 4, WIDTH // 4).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        return super().forward(x + self.out(mixed.transpose(1, 2).reshape(-1, WIDTH)))


class Network(nn.Module):
    def __init__(self, run=None, block=Block):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.run = run or {}

    def forward(self, x):
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            x = self.run[index](block, x) if index in self.run else block(x)
        return x.mean()


def simulated(checkpointing, block=Block):
    """Return the peak of the allocated memory that `classify` computes."""
    with torch.device("meta"):
        network = Network(block=block)
    job = ModuleJob(network, lambda size: torch.empty(size, WIDTH, device="meta"), lambda net, batch: net(batch))
    options = {"batch_size": ROWS, "optimizer": "sgd", "checkpointing": checkpointing}
    return Simulator(job).simulate(options, [A100]).peaks[A100.name].unbounded.allocated_bytes


def scripted(run, block=Block):
    """Return the peak of a script that calls torch's checkpointing itself, by the index of a block."""
    with CudaEmulation(A100, options=AllocatorOptions()):
        network = Network(run, block).to("cuda")
        optimizer = torch.optim.SGD(network.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            network(torch.empty(ROWS, WIDTH, device="cuda")).backward()
            optimizer.step()
        return torch.cuda.max_memory_allocated()


@pytest.fixture(scope="module")
def full():
    return simulated(True)


def test_the_second_of_two_blocks_is_recomputed(full):
    # the last block is recomputed at the peak in both forms; three others hold what is inside of them
    assert simulated("every=2") - full == BLOCKS // 2 * 8 * UNIT


def test_every_block_is_recomputed_by_full_and_by_every_1(full):
    assert TrainingSetup(batch_size=1, checkpointing="full") == TrainingSetup(batch_size=1, checkpointing=True)
    assert TrainingSetup(batch_size=1, checkpointing="every=1") == TrainingSetup(batch_size=1, checkpointing=True)
    assert simulated("full") == full


def test_ops_saves_every_second_product(full):
    # the first of two products in each block; the saved one is not computed again in the last block
    assert simulated("ops") - full == (BLOCKS - 1) * 4 * UNIT


def test_offload_leaves_no_inputs_of_blocks_on_the_device(full):
    # Only the input of the block that is being recomputed is there. All blocks then need the same, so that the peak is
    # in the first one, where the others have their gradients.
    gradients = (BLOCKS - 1) * 2 * 4 * WIDTH * WIDTH * 4
    assert full - simulated("offload") == (BLOCKS - 1) * UNIT - gradients


def by_every(run, step=1, first=None):
    return dict.fromkeys(range(step - 1 if first is None else first, BLOCKS, step), run)


def offloaded(run, block, x):
    with save_on_cpu(pin_memory=True):
        return run(block, x)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


def saving_attention_and_odd_products():
    """The contexts of torchtitan's selective_ac_option 'op', for the operators of `AttentionBlock`."""
    products = Counter()

    def policy(context, operator, *args, **kwargs):
        if operator is torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            is_saved = products[context.is_recompute] % 2 == 1
        else:
            is_saved = operator in ATTENTION
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


PLAIN, REENTRANT = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
SCRIPTS = {
    "full": by_every(PLAIN),
    "reentrant": by_every(REENTRANT),
    "every=2": by_every(PLAIN, 2),
    "every_n_layers=4": by_every(PLAIN, 4, first=0),
    "every_n_layers=9": {0: PLAIN},
    "offload": by_every(partial(offloaded, PLAIN)),
    "every=3,offload": by_every(partial(offloaded, PLAIN), 3),
}


@pytest.mark.parametrize("form", SCRIPTS)
def test_a_form_takes_the_memory_of_a_script_that_calls_torch(form):
    assert simulated(form) == pytest.approx(scripted(SCRIPTS[form]), rel=0.002)


def test_ops_takes_the_memory_of_a_script_with_the_same_policy():
    run = partial(checkpoint, use_reentrant=False, context_fn=saving_attention_and_odd_products)
    expected = scripted(by_every(run), AttentionBlock)
    assert simulated("ops", AttentionBlock) == pytest.approx(expected, rel=0.002)
    assert simulated(True, AttentionBlock) < expected < simulated(False, AttentionBlock)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("every=0", "every=0"),
        ("evry=2", "full, reentrant"),
        ("ops,offload", "only word"),
        ("every=2,every_n_layers=2", "leave one out"),
        (3, "true, false or a form"),
    ],
)
def test_a_wrong_form_is_refused(value, match):
    with pytest.raises(UserError, match=match):
        TrainingSetup(batch_size=1, checkpointing=value)


@pytest.mark.parametrize(("form", "chosen"), [("every=2", [1, 3]), ("every_n_layers=2", [0, 2, 4])])
def test_transformers_counts_blocks_from_the_first_one(form, chosen):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=5, num_attention_heads=2, vocab_size=50
    )
    network = transformers.LlamaForCausalLM(config)
    enable_checkpointing(network, checkpointing_form(form))
    marked = [index for index, layer in enumerate(network.model.layers) if layer.gradient_checkpointing]
    assert marked == chosen


def test_more_blocks_than_there_are_cannot_be_skipped():
    with pytest.raises(UserError, match="at least 7 blocks"):
        simulated("every=7")


def test_offloading_is_refused_for_specs_and_for_several_gpus():
    with pytest.raises(UserError, match="one GPU"):
        TrainingSetup(batch_size=1, checkpointing="offload", parallel="ddp(world_size=2)")
    spec = make_spec("mlp", MLP, TrainingSetup(batch_size=2, checkpointing="offload"))
    with pytest.raises(UserError, match="name the network itself"):
        Simulator(SpecJob(spec)).simulate({}, [A100])


def test_ids_of_specs_do_not_change_with_the_way_a_form_is_written():
    def spec(value):
        return make_spec("mlp", MLP, TrainingSetup(batch_size=2, checkpointing=value))

    assert spec(True).id == spec("full").id and spec(True).to_json()["training"]["checkpointing"] is True
    assert spec("offload,every=2").id == spec("every=2,offload").id != spec(True).id
    assert spec("none").id == spec(False).id and "checkpointing" not in spec(False).to_json()["training"]
