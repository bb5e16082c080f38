"""Compiles a network and its loss as a training setup says: each repeated block, or the whole network."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from vramcast.errors import UserError
from vramcast.virtual_gpu.compiled.releases import is_supported, unknown_release
from vramcast.virtual_gpu.tracing.owners import repeated_blocks
from vramcast.virtual_gpu.tracing.trace import Tracer
from vramcast.virtual_gpu.training.setup import TrainingSetup

if TYPE_CHECKING:
    from vramcast.virtual_gpu.compiled.session import CompileSession

_LOSSES = ("cross_entropy", "mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
_ABSENT = object()


@dataclass
class CompiledParts:
    """The modules that `compiled_network` has compiled, whose insides no hook sees."""

    modules: list[nn.Module] = field(default_factory=list)

    def hidden(self) -> set[int]:
        """Return the identities of the modules that run inside of compiled code."""
        return {id(part) for module in self.modules for part in module.modules() if part is not module}


@contextmanager
def compiled_network(tracer: Tracer, subject: nn.Module, setup: TrainingSetup) -> Iterator[CompiledParts]:
    """Compile the parts of a network that a setup names, until the context ends; add notes to the trace."""
    parts = CompiledParts()
    if not setup.is_compiled:
        yield parts
        return
    if not is_supported():
        tracer.trace.approximations.add(unknown_release())
        yield parts
        return
    from vramcast.virtual_gpu.compiled.session import CompileSession  # noqa: PLC0415 - needs Dynamo

    with (
        CompileSession(tracer, memory_budget=setup.memory_budget) as session,
        compiled_parts(session, subject, setup) as parts,
    ):
        yield parts
        tracer.trace.approximations.update(session.notes())


@contextmanager
def compiled_parts(session: "CompileSession", subject: nn.Module, setup: TrainingSetup) -> Iterator[CompiledParts]:
    """Compile the parts of a network that a setup names by a session, until the context ends."""
    parts = CompiledParts(_chosen(network_of(subject), setup.compile))
    with ExitStack() as stack:
        for module in parts.modules:
            stack.enter_context(_attribute(module, "forward", session.compiled(module.forward)))
        if setup.compile_loss:
            _compile_loss(stack, session, subject)
        yield parts


def network_of(subject: nn.Module) -> nn.Module:
    """Return the network inside of modules that compute a loss around it."""
    inner = getattr(subject, "subject", None)
    return network_of(inner) if isinstance(inner, nn.Module) else subject


def _chosen(network: nn.Module, form: str) -> list[nn.Module]:
    if form == "model":
        return [network]
    blocks = list(repeated_blocks(network)) if form == "blocks" else []
    if form == "blocks" and not blocks:
        raise UserError(
            f"expected repeated blocks in a ModuleList or Sequential of {type(network).__name__}, found none: "
            "use compile=model"
        )
    return blocks


def _compile_loss(stack: ExitStack, session: "CompileSession", subject: nn.Module) -> None:
    """Compile the loss function that a network has, as those of transformers, else those of torch."""
    owners = [item for item in subject.modules() if callable(getattr(item, "loss_function", None))]
    for owner in owners:
        stack.enter_context(_attribute(owner, "loss_function", session.compiled(owner.loss_function)))
    if not owners:
        for name in _LOSSES:
            stack.enter_context(session.replaced(F, name, session.compiled(getattr(F, name))))


@contextmanager
def _attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an instance, which hides that of its class."""
    before = vars(module).get(name, _ABSENT)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is _ABSENT and name in vars(module):
            delattr(module, name)
        elif before is not _ABSENT:
            setattr(module, name, before)
