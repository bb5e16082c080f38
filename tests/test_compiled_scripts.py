"""Scripts that compile: the real torch.compile on a virtual GPU, which allocates what compiled code does."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.job import ModuleJob
from vramcast.simulation.emulated_simulation import simulation_of_run
from vramcast.simulation.replays import Replays
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.compiled.releases import SUPPORTED, release
from vramcast.virtual_gpu.cuda.emulation import CudaEmulation
from vramcast.virtual_gpu.cuda.patches.compiler import _GRAPHS, _OPTIMIZER

pytestmark = pytest.mark.skipif(release() not in SUPPORTED, reason="compiled code is eager on this release of torch")
WIDTH, VOCABULARY = 64, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = (
            nn.Linear(*sizes) for sizes in ((WIDTH, 8 * WIDTH),) * 2 + ((8 * WIDTH, WIDTH),)
        )

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Network(nn.Module):
    """A small language model that asks where its tokens are, as many do."""

    def __init__(self, breaks: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.breaks, self.recompute = breaks, recompute

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.is_cuda
        assert tokens.device.type == "cuda"
        places = torch.cat((torch.arange(1, device="cuda"), torch.arange(1, tokens.shape[1], device=tokens.device)))
        x = self.tokens(tokens) + self.places(places) * torch.ones(WIDTH).cuda()
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
            if self.breaks and not index:
                torch._dynamo.graph_break()
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Outcome:
    allocated_bytes: int
    in_forward_bytes: int
    notes: tuple[str, ...]

    def graphs(self) -> int:
        made = next(note for note in self.notes if note.startswith("torch.compile made"))
        return int(made.split()[2])


def _train(
    prepare: Callable[[nn.Module], Any] = lambda network: network,
    loss: Callable[[], Callable[[Tensor, Tensor], Tensor]] = lambda: F.cross_entropy,
    lengths: tuple[int, ...] = (128, 128, 128),
    step: Callable[[Any], Callable[[], Any]] = lambda optimizer: optimizer.step,
    **options: Any,
) -> Outcome:
    with CudaEmulation(load_profile("a100_80gb")) as gpu:
        network = Network(**options).to("cuda")
        run, compute = prepare(network), loss()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        update = step(optimizer)
        for length in lengths:
            tokens = torch.randint(VOCABULARY, (8, length)).to("cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                output = run(tokens)
                in_forward = torch.cuda.memory_allocated()
                value = compute(output.flatten(0, 1), tokens.flatten())
            value.backward()
            update()
            optimizer.zero_grad()
            del output
        assert all(isinstance(item.item(), float) for item in [value])
        allocated = torch.cuda.max_memory_allocated()
        simulation_of_run(gpu, [], Replays(gpu.options))
        return Outcome(allocated, in_forward, tuple(map(str, gpu.assumptions.all())))


@pytest.fixture(scope="module")
def eager() -> Outcome:
    return _train()


def _whole(network: Any) -> Any:
    return torch.compile(network)  # looked up now: the virtual GPU and Lightning replace it


def _each_block(network: Any) -> nn.Module:
    for index, block in enumerate(network.blocks):
        network.blocks[index] = torch.compile(block, fullgraph=True)
    return network  # type: ignore[no-any-return]


def _in_place(network: nn.Module) -> nn.Module:
    network.compile()
    return network


@pytest.mark.parametrize(("prepare", "graphs"), [(_whole, 1), (_each_block, 1), (_in_place, 1)])
def test_compiled_code_saves_fewer_activations(prepare: Callable[[Any], Any], graphs: int, eager: Outcome) -> None:
    """The network is traced once for all steps, equal blocks share a graph, and compiled code sees CUDA."""
    compiled = _train(prepare)
    assert compiled.graphs() == graphs
    activation_bytes = 8 * 128 * 8 * WIDTH * 2
    assert compiled.in_forward_bytes <= eager.in_forward_bytes - 3 * activation_bytes  # the output of silu


def test_lightning_may_copy_the_arguments_of_the_compiler(eager: Outcome) -> None:
    import_module("lightning")  # it wraps torch.compile, and copies what it is called with
    assert _train(_each_block).in_forward_bytes < eager.in_forward_bytes


def test_a_graph_break_in_a_loop_leaves_the_network_and_compiles_its_blocks(eager: Outcome) -> None:
    compiled = _train(_whole, breaks=True)
    assert any("Block" in note for note in compiled.notes), compiled.notes
    assert any("not compiled" in note for note in compiled.notes)
    assert compiled.in_forward_bytes < eager.in_forward_bytes


def test_checkpointing_inside_of_compiled_code_is_kept() -> None:
    plain, recomputed = _train(_whole), _train(_whole, recompute=True)
    assert recomputed.in_forward_bytes < plain.in_forward_bytes


def test_a_compiled_loss_saves_copies_of_the_logits(eager: Outcome) -> None:
    compiled = _train(loss=lambda: torch.compile(F.cross_entropy))
    logits_bytes = 8 * 128 * VOCABULARY * 4
    assert eager.allocated_bytes - compiled.allocated_bytes >= logits_bytes


def test_dynamic_shapes_compile_once_for_all_lengths() -> None:
    compiled = _train(lambda network: torch.compile(network, dynamic=True), lengths=(128, 96, 64))
    assert compiled.graphs() == 1


def test_cuda_graphs_keep_their_memory_apart() -> None:
    compiled = _train(lambda network: torch.compile(network, mode="reduce-overhead"))
    assert _GRAPHS in compiled.notes


def test_a_compiled_step_of_the_optimizer_is_eager_and_says_so(eager: Outcome) -> None:
    compiled = _train(step=lambda optimizer: torch.compile(optimizer.step))
    assert compiled.allocated_bytes == eager.allocated_bytes
    assert any(_OPTIMIZER in note for note in compiled.notes)


def test_a_job_that_needs_cuda_is_compiled_where_its_network_sees_it() -> None:
    with torch.device("meta"):
        job = ModuleJob(nn.Sequential(Network()), lambda size: torch.zeros(size, 128, dtype=torch.long))
    job.runs_emulated = True
    profile = load_profile("a100_80gb")
    plain, compiled = (
        Simulator(job).simulate({"batch_size": 8, "compile": form}, [profile]) for form in ("none", "model")
    )
    assert any(note.startswith("torch.compile made 1 graphs") for note in compiled.notes)
    peaks = [item.peaks[profile.name].bounded.allocated_bytes or 0 for item in (plain, compiled)]
    assert peaks[1] < peaks[0]


def test_another_backend_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'openxla'"):
        _train(lambda network: torch.compile(network, backend="openxla"))


def test_an_unknown_release_runs_eager_code_and_says_so(eager: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    compiled = _train(_whole)
    assert compiled.allocated_bytes == eager.allocated_bytes
    assert any("9.9" in note for note in compiled.notes)
