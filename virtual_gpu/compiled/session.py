"""The compiler of one simulation: torch.compile runs as it is, and what it compiles allocates under a tracer."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from vramcast.errors import UserError
from vramcast.virtual_gpu.compiled.frames import DynamoPatches, forget_tables, restore_frame_evaluation
from vramcast.virtual_gpu.compiled.joint_graph import CompilerBackend, compile_graph
from vramcast.virtual_gpu.compiled.notes import FUSION, MADE
from vramcast.virtual_gpu.operators.autocast import replaced

aten = torch.ops.aten
_META = torch.device("meta")
_KERNELS = "compiled {} is simulated by the tensors of its kernel: inputs and outputs"
_LIMIT = "recompile limit"
"""In the message of Dynamo (convert_frame.py) for a function that it recompiled too often."""
_POOLED = 1 << 20
"""The number of the stream that stands for the private pool of CUDA graphs: no other block is reused there."""


@dataclass
class CompileRecord:
    """The graphs, kernels and graph breaks of a simulation."""

    graphs: int = 0
    nodes: int = 0
    names: dict[str, int] = field(default_factory=dict)
    """The compiled functions by name, each with its number of graphs."""
    breaks: dict[str, None] = field(default_factory=dict)
    """Reasons for which torch.compile split a function or left it alone."""
    kernels: dict[str, None] = field(default_factory=dict)
    """Kernels that only CUDA has, in compiled graphs."""
    limited: dict[str, None] = field(default_factory=dict)
    """Functions that Dynamo recompiled as often as it may, and that run as eager code from then on."""

    def note(self) -> str:
        """Return one sentence about it."""
        names = ", ".join(f"{name} ({count})" for name, count in list(self.names.items())[:5])
        more = f" and {len(self.names) - 5} more" if len(self.names) > 5 else ""
        split = f"; not compiled: {'; '.join(list(self.breaks)[:3])}" if self.breaks else ""
        limit = f"; at the recompile limit, then eager: {', '.join(self.limited)}" if self.limited else ""
        return f"{MADE}{self.graphs} graphs: {names}{more}{split}{limit}"


class OtherPatches(Protocol):
    """Patches of torch that are none of the compiler's."""

    def lifted(self) -> AbstractContextManager[Any]:
        """Return a context in which torch is as it was before them."""

    def replaces(self, value: Any) -> bool:
        """Return whether a value of torch is replaced by another."""


class _NoPatches:
    def lifted(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def replaces(self, value: Any) -> bool:
        return False


class CompileSession:
    """The compiler of one simulation. Patches of torch are global: one session at a time in a process.

    Args:
        tracer: Sees what compiled code allocates, and nothing while torch compiles.
        patches: Other patches of torch, which the compiler must not see.
        device: The device that compiled code sees its tensors on; None for meta.
        memory_budget: The part of activations that the partitioner may save; None leaves torch's setting.
    """

    def __init__(
        self,
        tracer: Any,
        patches: OtherPatches | None = None,
        device: torch.device | None = None,
        memory_budget: float | None = None,
    ) -> None:
        self.tracer = tracer
        self.record = CompileRecord()
        self._patches = patches or _NoPatches()
        self._device = device
        self.memory_budget = memory_budget
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._stack = ExitStack()
        self._local = threading.local()
        self._backends: dict[bool, Any] = {}

    def __enter__(self) -> "CompileSession":
        with ExitStack() as stack, self._patches.lifted():
            self._forget()
            stack.callback(self._forget)
            stack.enter_context(DynamoPatches(self.compiling, self.replaces, self._device).applied())
            self._stack = stack.pop_all()
        return self

    def _forget(self) -> None:
        """Drop all compiled code, and tables that Dynamo filled while torch was patched."""
        with self._patches.lifted():
            import torch._dynamo  # noqa: PLC0415 - takes seconds to import

            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            forget_tables()
            restore_frame_evaluation()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def compiling(self, code: CodeType) -> Iterator[None]:
        """Trace nothing, with torch as it was: Dynamo and AOTAutograd run inside, for the code of a frame."""
        before = getattr(self._local, "name", None)
        self._local.name = code.co_qualname
        import torch._functorch.config as functorch_config  # noqa: PLC0415
        from torch._subclasses.fake_tensor import fake_tensor_tls  # noqa: PLC0415

        budget = {} if self.memory_budget is None else {"activation_memory_budget": self.memory_budget}
        with (
            self.lifted(),
            self.tracer.silent(),
            functorch_config.patch(budget),
            # torch.tensor(..., device="meta") is no fake tensor under a fake mode, as one on CUDA would be
            replaced(fake_tensor_tls, "allow_non_fake_inputs_override", True),
        ):
            try:
                yield
            except Exception as error:  # of torch, which decides by it what to run as eager code
                self._note_failure(code.co_qualname, str(error))
                inner = getattr(error, "inner_exception", None)
                if isinstance(inner, UserError):
                    raise inner from error
                raise
            finally:
                self._local.name = before

    @contextmanager
    def replaced(self, owner: Any, name: str, value: Any) -> Iterator[None]:
        """Replace a function of torch for the code that runs, but not for the compiler."""
        entry = (owner, name, getattr(owner, name), value)
        setattr(owner, name, value)
        self._replaced.append(entry)
        try:
            yield
        finally:
            self._replaced.remove(entry)
            setattr(owner, name, entry[2])

    def replaces(self, value: Any) -> bool:
        """Return whether a value of torch is replaced by another for the code that runs."""
        return self._patches.replaces(value) or any(value is original for _, _, original, _ in self._replaced)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Let torch be as it was before all patches."""
        with self._patches.lifted():
            for owner, name, original, _ in self._replaced:
                setattr(owner, name, original)
            try:
                yield
            finally:
                for owner, name, _, value in self._replaced:
                    setattr(owner, name, value)

    def compiled(self, function: Any, *, pooled: bool = False, **options: Any) -> Any:
        """Return a function or a module compiled by torch.compile."""
        self.tracer.trace.approximations.add(FUSION)
        with self.lifted():
            return torch.compile(function, backend=self._backend(pooled), **options)

    def _backend(self, pooled: bool) -> Any:
        """Return the backend: one object for all functions, so that equal blocks share a graph."""
        if pooled not in self._backends:
            self._backends[pooled] = CompilerBackend(compile_graph, self, partial(self._allocate, pooled))
        return self._backends[pooled]

    def notes(self) -> list[str]:
        """Return what was compiled, how much of it, and what was not."""
        record = self.record
        if not record.graphs:
            return ["nothing was compiled: torch.compile found no graph"]
        from torch._dynamo.utils import counters  # noqa: PLC0415

        for reason in counters["graph_break"]:
            record.breaks.setdefault(_first_line(str(reason)))
        names = ", ".join(record.kernels)
        return [record.note(), *([_KERNELS.format(names)] if names else [])]

    def _note_failure(self, name: str, reason: str) -> None:
        """Record why Dynamo leaves a frame alone."""
        if _LIMIT in reason.lower():
            self.record.limited[name] = None
        else:
            self.record.breaks.setdefault(f"{name} ({_first_line(reason)})")

    def _allocate(self, pooled: bool, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        before = self.tracer.stream
        if pooled:
            self.tracer.stream = _POOLED
        try:
            return aten.empty_strided.default(size, stride, dtype=dtype, device=_META)  # type: ignore[no-any-return]
        finally:
            self.tracer.stream = before

    def note_graph(self, module: fx.GraphModule) -> None:
        """Record a graph that Dynamo made."""
        record = self.record
        record.graphs += 1
        record.nodes += len(module.graph.nodes)
        code = str(getattr(self._local, "name", "a function"))
        name = (_outermost_class(module) or code) if "<locals>" in code else code
        record.names[name] = record.names.get(name, 0) + 1


def _outermost_class(module: fx.GraphModule) -> str | None:
    """Return the class of the outermost module in a graph, None for a function."""
    for node in module.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if stack:
            kind = stack[0][1]
            return str(getattr(kind, "__name__", kind))
    return None


def _first_line(text: str) -> str:
    return " ".join(text.strip().partition("\n")[0].split())[:120]
