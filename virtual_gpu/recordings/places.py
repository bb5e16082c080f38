"""Stacks of recordings as people read them: the operator, the line of the user's code, and the part of the step."""

import re
from functools import lru_cache

from vramcast.virtual_gpu.recordings.recording import Frame, Stack
from vramcast.virtual_gpu.tracing.trace import Use

_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)")
_KERNEL = re.compile(r"^at::native::(\w+)\(")
_LIBRARY = re.compile(
    r"(site|dist)-packages/|/lib(64)?/python3|^(lib/)?(python)?3\.\d+/|^<|"
    r"^(torch|torchvision|einops|jaxtyping|beartype|numpy|triton|transformers|accelerate|peft|trl|lightning|"
    r"pytorch_lightning|deepspeed|apex|bitsandbytes|xformers|flash_attn|diffusers|timm|fairscale|megatron)/"
)
_BACKWARD = ("torch::autograd::Engine", "torch::autograd::python::PythonEngine", "torch::autograd::Node::operator()")
_WORKSPACE = re.compile(r"cublas|getChosenWorkspace|cudnn.*[wW]orkspace|[wW]orkspace|parseChosenWorkspace")
_OPTIMIZER_FILE = re.compile(
    r"(^|/)(optim|optimizers?|optimi[sz]er\w*|adamw?\w*|sgd\w*|muon\w*|lion\w*)(/|\.py$)", re.I
)
_OPTIMIZER_FUNCTIONS = frozenset({"step", "_init_group", "_init_state", "init_state", "update"})
_PARAMETER_FUNCTIONS = frozenset({
    "__init__", "_apply", "convert", "reset_parameters", "init_weights", "from_pretrained", "load_state_dict",
    "_load_state_dict", "__new__",
})  # fmt: skip
_USES = frozenset(use.name.lower() for use in Use)


@lru_cache(maxsize=65_536)
def operator_of(stack: Stack) -> str:
    """Return the operator that a stack is in: the outermost one that the script or the backward pass called."""
    name = ""
    for frame in stack:
        if frame.file.endswith(".py") and name:
            break
        if frame.function.startswith(_BACKWARD):
            break
        match = _OPERATOR.match(frame.function)
        if match:
            name = match[1]
    return name or _native_name(stack)


def _native_name(stack: Stack) -> str:
    """Return the name of a kernel's function, or the innermost Python function."""
    for frame in stack:
        match = _KERNEL.match(frame.function)
        if match:
            return match[1]
    return next((frame.function for frame in stack if frame.file.endswith(".py")), "")


@lru_cache(maxsize=65_536)
def line_of(stack: Stack) -> str:
    """Return the innermost line of the user's code as 'file:line', or of a library if there is none."""
    python = [frame for frame in stack if frame.file.endswith(".py") or frame.function == "script"]
    frame = next((item for item in python if not _LIBRARY.search(item.file)), python[0] if python else None)
    return f"{frame.file}:{frame.line}" if frame else ""


@lru_cache(maxsize=65_536)
def in_backward(stack: Stack) -> bool:
    """Return True for a stack of autograd's engine. Recordings without native frames have no frame there at all."""
    return not stack or any(frame.function.startswith(_BACKWARD) for frame in stack)


@lru_cache(maxsize=65_536)
def in_optimizer(stack: Stack) -> bool:
    """Return True for a stack inside of an optimizer."""
    return any(
        frame.function in _OPTIMIZER_FUNCTIONS and _OPTIMIZER_FILE.search(frame.file) is not None
        for frame in stack
        if frame.file.endswith(".py")
    ) or any("torch/optim/" in frame.file and frame.function != "zero_grad" for frame in stack)


@lru_cache(maxsize=65_536)
def in_workspace(stack: Stack) -> bool:
    """Return True for the workspace of a library."""
    return any(_WORKSPACE.search(frame.function) for frame in stack[:12] if not frame.file.endswith(".py"))


@lru_cache(maxsize=65_536)
def makes_parameters(stack: Stack) -> bool:
    """Return True for a stack that builds, moves or loads a network."""
    return any(frame.function in _PARAMETER_FUNCTIONS for frame in stack if frame.file.endswith(".py"))


def in_forward(stack: Stack) -> bool:
    """Return True for a stack inside of a module's call."""
    return any(frame.function in ("forward", "_call_impl") for frame in stack)


def clears_gradients(stack: Stack) -> bool:
    """Return True for a stack that sets gradients to None."""
    return any(frame.function == "zero_grad" or frame.function.startswith("THPVariable_set_grad") for frame in stack)


def simulated_use(stack: Stack) -> str | None:
    """Return the use of a block in a snapshot of the virtual GPU, which writes it as the first frame."""
    first = stack[0] if stack else Frame("", 1, "")
    return first.function if first.function in _USES and first.line == 0 and not first.file.endswith(".py") else None
