"""Brackets Dynamo: while it compiles a frame, torch is as it was, and no tracer watches (checked with torch 2.13).

`releases.py` lists the patched attributes, each with its reason.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import CodeType
from typing import Any

import torch

from vramcast.virtual_gpu.operators.autocast import replaced

_OWN = "vramcast.virtual_gpu"
"""Frames of the virtual GPU, such as wrappers around modules, are never compiled."""
_GUARDS = ("id_match_unchecked", "ID_MATCH", "CLOSURE_MATCH")
"""The first is what all guards on an identity call; before torch 2.9 they call the second."""
_META = torch.device("meta")


class DynamoPatches:
    """The patches of Dynamo for one session.

    Args:
        compiling: Returns the context in which Dynamo compiles a frame.
        replaces: Says whether a value of torch is replaced while code runs: a guard on it would fail at each call.
        device: The device that compiled code sees device tensors on; None for meta.
    """

    def __init__(
        self,
        compiling: Callable[[CodeType], AbstractContextManager[Any]],
        replaces: Callable[[Any], bool],
        device: torch.device | None,
    ) -> None:
        self._compiling = compiling
        self._replaces = replaces
        self._device = device

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the patches."""
        from torch._dynamo import convert_frame, trace_rules  # noqa: PLC0415 - takes seconds to import

        trace_rules.add(_OWN)
        with ExitStack() as stack:
            original = convert_frame._compile
            stack.enter_context(replaced(convert_frame, "_compile", self._bracketed(original)))
            self._guard_less(stack)
            if self._device is not None:
                self._see_cuda(stack)
            yield

    def _guard_less(self, stack: ExitStack) -> None:
        """Leave out guards on functions of torch that are replaced while code runs."""
        from torch._dynamo.guards import GuardBuilder  # noqa: PLC0415

        def unless_replaced(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def match(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> Any:
                return None if self._replaces(builder.get(guard)) else original(builder, guard, *args, **kwargs)

            return match

        for name in filter(partial(hasattr, GuardBuilder), _GUARDS):
            stack.enter_context(replaced(GuardBuilder, name, unless_replaced(getattr(GuardBuilder, name))))

    def _bracketed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def compile_frame(*args: Any, **kwargs: Any) -> Any:
            with self._compiling(kwargs["code"] if "code" in kwargs else args[0]):
                return original(*args, **kwargs)

        return compile_frame

    def _see_cuda(self, stack: ExitStack) -> None:
        """Let compiled code see meta tensors on CUDA, and put on meta what it makes on CUDA."""
        from torch._dynamo.output_graph import SubgraphTracer  # noqa: PLC0415
        from torch._dynamo.variables.base import VariableTracker  # noqa: PLC0415
        from torch._dynamo.variables.tensor import TensorVariable  # noqa: PLC0415
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

        device, dispatch = self._device, FakeTensorMode.dispatch

        def on_meta(item: Any) -> Any:
            names_cuda = item.startswith("cuda") if isinstance(item, str) else False
            return _META if names_cuda or (isinstance(item, torch.device) and item.type == "cuda") else item

        def dispatch_on_meta(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            moved = {name: on_meta(item) for name, item in (kwargs or {}).items()}
            return dispatch(self, func, types, tuple(map(on_meta, args)), moved)

        def shown(self: Any, tx: Any) -> Any:
            where = self.device
            if where is None:
                return None
            return VariableTracker.build(tx, device if where.type == "meta" else where)

        def is_cuda(self: Any, tx: Any) -> Any:
            where = self.device
            return None if where is None else VariableTracker.build(tx, where.type in ("meta", "cuda"))

        create = SubgraphTracer.create_proxy

        def create_on_meta(self: Any, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> Any:
            if kind == "call_method" and target == "cuda":
                target, args, kwargs = "to", (args[0], _META), {}
            moved = {name: on_meta(item) for name, item in kwargs.items()}
            return create(self, kind, target, tuple(map(on_meta, args)), moved, *more, **named)

        stack.enter_context(replaced(SubgraphTracer, "create_proxy", create_on_meta))
        stack.enter_context(replaced(FakeTensorMode, "dispatch", dispatch_on_meta))
        stack.enter_context(replaced(TensorVariable, "method_attr_device", shown))
        stack.enter_context(replaced(TensorVariable, "method_attr_is_cuda", is_cuda))


def forget_tables() -> None:
    """Forget Dynamo's tables of torch's functions, which it may have filled while other patches were in force."""
    from torch._dynamo import trace_rules  # noqa: PLC0415

    trace_rules.clear_lru_cache()


def restore_frame_evaluation() -> None:
    """Let CPython evaluate frames itself again, which torch does not after a compilation that raised.

    Under torch's evaluation a caller holds the arguments of a call until it returns, so tensors are freed later.
    """
    from torch._C._dynamo import eval_frame  # noqa: PLC0415

    running = getattr(eval_frame, "get_eval_frame_callback", lambda: None)()
    python = ctypes.pythonapi
    names = ("PyInterpreterState_Get", "_PyInterpreterState_SetEvalFrameFunc", "_PyEval_EvalFrameDefault")
    if running is not None or not all(hasattr(python, name) for name in names):
        return
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    interpreter = ctypes.c_void_p(python.PyInterpreterState_Get())
    python._PyInterpreterState_SetEvalFrameFunc(interpreter, python._PyEval_EvalFrameDefault)
