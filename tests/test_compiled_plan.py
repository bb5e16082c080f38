"""Compiled graphs: the own plan computes what eager code computes, and allocates less."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vramcast.device.profiles import load_profile
from vramcast.errors import UntraceableError
from vramcast.jobs.spec import LayerTable
from vramcast.models.examples import example_of_table
from vramcast.models.uncertainty import strata, unit_bytes
from vramcast.virtual_gpu.compiled import joint_graph, node_kinds
from vramcast.virtual_gpu.compiled.networks import compiled_network
from vramcast.virtual_gpu.compiled.node_kinds import NodeKind
from vramcast.virtual_gpu.compiled.notes import FUSION
from vramcast.virtual_gpu.compiled.own_plan import MemoryPlan
from vramcast.virtual_gpu.compiled.releases import SUPPORTED, release
from vramcast.virtual_gpu.compiled.session import CompileSession
from vramcast.virtual_gpu.distributed.rank_session import trace_rank
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.operators.cuda_paths import cuda_paths
from vramcast.virtual_gpu.operators.kernels import cuda_kernels
from vramcast.virtual_gpu.replay.replay import FREE
from vramcast.virtual_gpu.tracing.session import trace_training
from vramcast.virtual_gpu.tracing.trace import Tracer
from vramcast.virtual_gpu.training.setup import TrainingSetup

pytestmark = pytest.mark.skipif(release() not in SUPPORTED, reason="compiled code is eager on this release of torch")
WIDTH = 32


class Block(nn.Module):
    """A Transformer block with everything that plans treat differently: norms, attention, dropout, residuals."""

    def __init__(self, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self._block(x)
        out: Tensor = checkpoint(self._block, x, use_reentrant=False)
        return out

    def _block(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.mish(self.up(self.norm_2(x)))))


class Convolutions(nn.Module):
    """Convolutions with batch norm, whose running statistics a graph writes in place, and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        out: Tensor = self.head(F.relu(self.second(x)).mean((2, 3)))
        return out


class Recurrence(nn.Module):
    """A scan over positions, as state-space networks have, with gates and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gate, value = torch.sigmoid(self.gate(x)), self.value(x)
        state = torch.zeros_like(value[:, 0])
        states = []
        for place in range(tokens.shape[1]):
            state = gate[:, place] * state + (1 - gate[:, place]) * value[:, place]
            states.append(state)
        return torch.stack(states, dim=1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "transformer": (lambda: nn.Sequential(Block(), Block()), lambda: torch.randn(2, 8, WIDTH)),
    "recomputed": (lambda: nn.Sequential(*(Block(recompute=True) for _ in range(2))), lambda: torch.randn(2, 8, WIDTH)),
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 8, 8)),
    "recurrence": (Recurrence, lambda: torch.randint(50, (2, 5))),
}  # fmt: skip


class _Computed:
    """Runs a plan on tensors with data; a loop is computed from what the plan keeps alive, and from nothing else."""

    def __init__(self, module: fx.GraphModule, inputs: Any) -> None:
        self.plan = MemoryPlan(module)
        self._boxed_call = True

    def __call__(self, values: list[Any]) -> tuple[Any, ...]:
        plan = self.plan
        alive: dict[fx.Node, Any] = dict(zip(plan._inputs, values, strict=True))
        values.clear()
        fused: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node in alive:
                return alive[node]
            assert node not in plan._exists or plan._kinds[node] in (NodeKind.VIEW, NodeKind.ITEM), (
                f"{node} was freed too early"
            )
            if node not in fused:
                fused[node] = compute(node)
            return fused[node]

        def compute(node: fx.Node) -> Any:
            if plan._kinds[node] is NodeKind.CONSTANT:
                return getattr(plan._module, str(node.target))
            target: Any = node.target
            arguments = fx.node.map_aggregate(
                (node.args, node.kwargs), lambda x: value(x) if isinstance(x, fx.Node) else x
            )
            return target(*arguments[0], **arguments[1])

        for node in plan.steps:
            kind = plan._kinds[node]
            if kind is NodeKind.OUTPUT:
                return tuple(fx.node.map_aggregate(node.args[0], lambda x: value(x) if isinstance(x, fx.Node) else x))
            if kind is NodeKind.WRITE or (node in plan._exists and kind is not NodeKind.INPUT):
                alive[node] = compute(node)
            fused.clear()
            for dead in plan._last_uses.get(node, ()):
                alive.pop(dead, None)
                for viewer in plan._viewers.get(dead, ()):
                    alive.pop(viewer, None)
        raise AssertionError("no output")


def _step(network: nn.Module, run: Callable[[Tensor], Tensor], batch: Tensor) -> list[Tensor]:
    network.zero_grad()
    output = run(batch)
    (output * torch.linspace(0, 1, output.numel()).view(output.shape)).sum().backward()
    assert all(item.grad is not None for item in network.parameters())
    return [
        output,
        *(item.grad.clone() for item in network.parameters()),
        *(item.clone() for item in network.buffers()),
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_plan_computes_the_outputs_gradients_and_buffers_of_eager_code(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan keeps alive what is read later, and no parameter loses its gradient."""
    make, batch = NETWORKS[name]
    torch.manual_seed(0)
    network, inputs = make().double(), batch()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    state = {key: value.clone() for key, value in network.state_dict().items()}
    expected = _step(network, network, inputs)
    network.load_state_dict(state)
    monkeypatch.setattr(node_kinds, "_on_host", lambda value: False)  # the host stands for the device here
    monkeypatch.setattr(joint_graph, "_planned", lambda _session, _allocate, module, values: _Computed(module, values))
    with CompileSession(Tracer(cuda_kernels())) as session:
        computed = _step(network, session.compiled(network), inputs)
    assert session.record.graphs == 1
    for ours, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def _peak_bytes(trace: Any) -> int:
    sizes: dict[int, int] = {}
    live = peak = 0
    for block, size in trace.events:
        if block < 0 or size < FREE:
            continue
        if size == FREE:
            live -= sizes.pop(block, 0)
        else:
            sizes[block] = size
            live += size
            peak = max(peak, live)
    return peak


def _traced(network: nn.Module, shape: tuple[int, ...], **options: Any) -> Any:
    setup = TrainingSetup(batch_size=shape[0], loss="mse", optimizer="SGD", **options)
    with torch.device("meta"):
        return trace_training(network, lambda size: (torch.empty(size, *shape[1:]),), setup, owners=True)


def _stack(count: int = 4, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block(**options) for _ in range(count)))


@pytest.mark.parametrize(("compile", "graphs"), [("blocks", 2), ("model", 1)])
def test_a_compiled_network_saves_fewer_activations(compile: str, graphs: int) -> None:
    """Equal blocks share a graph; the input of the first needs no gradient, so it has its own."""
    shape = (16, 64, WIDTH)
    eager = _peak_bytes(_traced(_stack(dropout=0.1), shape))
    trace = _traced(_stack(dropout=0.1), shape, compile=compile)
    activation_bytes = 16 * 64 * WIDTH * 4
    assert _peak_bytes(trace) <= eager - 4 * activation_bytes  # each block recomputes one at least
    assert FUSION in trace.approximations
    made = next(note for note in trace.approximations if note.startswith("torch.compile made"))
    assert f" made {graphs} graphs" in made


def test_a_memory_budget_makes_the_partitioner_save_less() -> None:
    shape = (16, 64, WIDTH)
    free, tight = (_peak_bytes(_traced(_stack(), shape, compile="model", memory_budget=part)) for part in (1.0, 0.1))
    assert tight < 0.9 * free


def test_checkpointing_inside_of_a_compiled_block_is_kept() -> None:
    shape = (16, 64, WIDTH)
    plain = _peak_bytes(_traced(_stack(), shape, compile="blocks"))
    assert _peak_bytes(_traced(_stack(recompute=True), shape, compile="blocks")) < 0.8 * plain


def test_a_compiled_loss_holds_no_log_probabilities_nor_their_gradient() -> None:
    with torch.device("meta"):
        networks = [nn.Linear(16, 4096) for _ in range(2)]
    options = {"batch_size": 256, "loss": "cross_entropy", "optimizer": "SGD"}
    traces = [
        trace_training(network, lambda size: (torch.empty(size, 16, device="meta"),), TrainingSetup(**options, **more))
        for network, more in zip(networks, ({}, {"compile_loss": True}), strict=True)
    ]
    logits = 256 * 4096 * 4
    assert _peak_bytes(traces[0]) - _peak_bytes(traces[1]) == pytest.approx(2 * logits, rel=0.05)


class _Loses(torch.autograd.Function):
    """Allocates its output without computing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(x.shape, device=x.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.empty(gradients[0].shape, device=gradients[0].device)


@pytest.mark.parametrize(("parallel", "compile"), [("ddp(world_size=2)", "model"), ("fsdp2(world_size=2)", "blocks")])
def test_a_rank_trains_a_compiled_network(parallel: str, compile: str) -> None:
    peaks = []
    for form in ("none", compile):
        network = _stack(2, dropout=0.1)
        setup = TrainingSetup(batch_size=16, loss="mse", optimizer="SGD", parallel=parallel, compile=form)
        assert setup.parallelism is not None
        trace = trace_rank(
            network, lambda size: (torch.empty(size, 64, WIDTH, device="meta"),), setup, setup.parallelism
        )
        assert all(item.grad is not None for item in network.parameters())
        peaks.append(_peak_bytes(trace))
    assert peaks[1] <= peaks[0] - 2 * 16 * 64 * WIDTH * 4  # each block recomputes one activation at least


def test_a_graph_that_loses_an_input_is_an_error() -> None:
    with torch.device("meta"):
        first, x = nn.Linear(8, 8), torch.empty(4, 8)
    tracer = Tracer(cuda_kernels())
    with CompileSession(tracer) as session, cuda_paths():
        run = session.compiled(lambda x: _Loses.apply(first(x)))
        with tracer, pytest.raises(UntraceableError, match="uses all its inputs"):
            run(x)
    assert _freed_before_the_call_returns()
    assert _traced(_stack(1), (2, 8, WIDTH), compile="model").approximations  # and torch compiles again


def _freed_before_the_call_returns() -> bool:
    """Return whether a callee frees an argument that nobody else holds: only frames that CPython evaluates do."""

    def callee(x: Any) -> bool:
        alive = weakref.ref(x)
        del x
        return alive() is None

    return [callee(nn.Identity()) for _ in range(50)][-1]  # CPython specialises a call after some repetitions


def test_torch_is_as_before_once_the_session_ends() -> None:
    import torch._dynamo.convert_frame as convert_frame

    before = convert_frame._compile, dict(torch.ops.aten.rms_norm.default.py_kernels)
    network = _stack(1)
    tracer = Tracer(cuda_kernels())
    setup = TrainingSetup(batch_size=2, compile="model")
    with compiled_network(tracer, network, setup):
        assert convert_frame._compile is not before[0]
    assert convert_frame._compile is before[0]
    assert dict(torch.ops.aten.rms_norm.default.py_kernels) == before[1]
    assert "forward" not in vars(network)


def test_an_unknown_release_runs_eager_code_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.9.0")
    trace = _traced(_stack(1), (2, 8, WIDTH), compile="model")
    assert any("9.9" in note and "eager" in note for note in trace.approximations)


def test_a_compiled_job_has_a_wider_bound_and_a_stratum_of_its_own() -> None:
    table = LayerTable((), ((1024, 1024),), 64)
    profile = load_profile("a100_80gb")
    notes = (FUSION, "torch.compile made 1 graphs: Net.forward (1)")
    peak = {"requested_bytes": 2**30, "allocated_bytes": 2**30, "reserved_bytes": 2**30, "device_used_bytes": 2**30}
    simulated = Measurement(status=Status.OK, breakdown={"context": 0}, **peak)
    plain, compiled = (
        example_of_table(table, TrainingSetup(batch_size=8), profile, replace(simulated, notes=these), "timm")
        for these in ((), notes)
    )
    assert compiled.compiled and not compiled.assumed and not plain.compiled
    assert "real, exact, compiled code" in strata(compiled)
    assert unit_bytes(compiled, "real, exact", 0.0) > unit_bytes(plain, "real, exact", 0.0)
