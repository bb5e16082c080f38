"""Autocast on the meta device: the casts and the cache of cast weights of torch.autocast("cuda").

Meta tensors have no autocast key, so during a trace they use the CPU's key with CUDA's rules. torch's own switches,
nesting and checkpointing then work unchanged. Lists and policies are from aten/src/ATen/autocast_mode.h, which every
wheel of torch contains; `tests/test_virtual_rules.py` compares them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.operators.meta_tensors import is_meta
from vramcast.virtual_gpu.training.step import DTYPES


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOWER = _words("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    cudnn_convolution cudnn_convolution_transpose
""")
SINGLE = _words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d
    upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
""")
SINGLE_OUTPUT = _words("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
BANNED = "binary_cross_entropy"

_KEY = torch._C.DispatchKey.AutocastCPU
_LISTS = (*LOWER, *SINGLE, *SINGLE_OUTPUT, *APPENDED, *WIDEST, BANNED)


def autocast(dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context for a forward pass on meta that casts as `torch.autocast("cuda", dtype)` does on a GPU."""
    return partial(_forward_pass, DTYPES[dtype])


@contextmanager
def _forward_pass(dtype: torch.dtype) -> Iterator[None]:
    with autocast_rules(), torch.autocast("cuda", dtype):
        yield


class _Rules:
    """CUDA's rules for one trace, and the weights that a forward pass has cast so far."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        self._installed = False

    def install(self) -> None:
        """Register the rules at first use: registration takes longer than a small trace."""
        if not self._installed:
            self._installed = True
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                self._register()

    def _register(self) -> None:
        borrowed = {name.removeprefix("aten::") for name in _registered("AutocastCPU")}
        for name in borrowed.union(_LISTS):
            operator = _operator(name)
            if operator is not None:  # an older or newer torch may lack one
                self._library.impl(name, self._rule(name, operator), "AutocastCPU")  # type: ignore[no-untyped-call]

    def undo(self) -> None:
        self.forget()
        self._library._destroy()  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        self._cache.clear()

    def _rule(self, name: str, operator: Any) -> Callable[..., Any]:
        if name in LOWER:
            return partial(self._lower, operator)
        if name in SINGLE:
            return partial(self._single, operator)
        if name in SINGLE_OUTPUT:
            return partial(self._single_output, operator)
        if name in APPENDED:
            return partial(self._appended, _operator(APPENDED[name]))
        if name in WIDEST:
            return partial(self._widest, operator)
        return _refuse if name == BANNED else torch.library.fallthrough_kernel

    def _lower(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(operator, torch.get_autocast_dtype("cpu"), args, kwargs)

    def _single(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(operator, torch.float32, args, kwargs)

    def _widest(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        dtypes = {item.dtype for item in _tensors(args) if _eligible(item)}
        widest = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cpu")
        return self._run(operator, widest, args, kwargs)

    def _single_output(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave inputs unchanged; return single precision, unless the caller passes a dtype."""
        if _eligible(args[0]):
            at = [item.name for item in operator._schema.arguments].index("dtype")
            if at < len(args):
                args = (*args[:at], torch.float32 if args[at] is None else args[at], *args[at + 1 :])
            elif kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
        with _without_autocast():
            return operator(*args, **kwargs)

    def _appended(self, operator: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
        with _without_autocast():
            return operator(*_with_defaults(operator, args), dtype=dtype)

    def _run(self, operator: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _without_autocast():
            cast = [self._cast(item, dtype) for item in args]
            return operator(*cast, **{name: self._cast(item, dtype) for name, item in kwargs.items()})

    def _cast(self, item: Any, dtype: torch.dtype) -> Any:
        if isinstance(item, (list, tuple)):
            return [self._cast(part, dtype) for part in item]
        if not isinstance(item, Tensor) or not _eligible(item) or item.dtype == dtype:
            return item
        if not _cacheable(item, dtype):
            return item.to(dtype)
        if id(item) not in self._cache:
            self._cache[id(item)] = (item, item.to(dtype))
        return self._cache[id(item)][1]


def _eligible(item: Tensor) -> bool:
    return is_meta(item) and item.is_floating_point() and item.dtype != torch.float64


def _cacheable(item: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast is cached: weights are, leaves in fp32 with a gradient (autocast_mode.cpp, cached_cast)."""
    wanted = dtype == torch.get_autocast_dtype("cpu") and item.dtype == torch.float32
    leaf = item.requires_grad and item.is_leaf and not item._is_view()
    return wanted and leaf and torch.is_autocast_cache_enabled()


def _tensors(args: tuple[Any, ...]) -> Iterator[Tensor]:
    for item in args:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(tuple(item))


def _with_defaults(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add defaults for the additional positional arguments of another overload."""
    wanted = [item for item in operator._schema.arguments if not item.kwarg_only]
    filled = {"p": 2, "keepdim": False}
    return (*args, *(filled[item.name] for item in wanted[len(args) :]))


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("torch refuses binary_cross_entropy under autocast: use binary_cross_entropy_with_logits")


def _without_autocast() -> AbstractContextManager[Any]:
    guard: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY))
    return guard


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _registered(key: str) -> list[str]:
    names: list[str] = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return [name for name in names if name.startswith("aten::")]


_active: list[_Rules] = []


@contextmanager
def autocast_rules() -> Iterator[None]:
    """Let torch.autocast("cuda") and ("meta") cast meta tensors as CUDA's; may be nested."""
    if _active:
        yield
        return
    rules = _Rules()
    _active.append(rules)
    try:
        with (
            torch._C._IncludeDispatchKeyGuard(_KEY),
            replaced(torch.autocast, "__init__", _any_device(torch.autocast.__init__, rules)),
            replaced(torch, "clear_autocast_cache", _both(torch.clear_autocast_cache, rules)),
        ):
            yield
    finally:
        rules.undo()
        _active.remove(rules)


@contextmanager
def autocast_rules_in_thread() -> Iterator[None]:
    """Apply the rules of another thread in this one: included dispatch keys are thread-local."""
    with torch._C._IncludeDispatchKeyGuard(_KEY):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, and restore it on exit."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def autocast_without_effect() -> Iterator[None]:
    """Let code enter torch.autocast("meta"), which torch refuses: transformers 4 does so to switch autocast off.

    For passes that count elements and need no dtypes. Checked with torch 2.6 to 2.13.
    """
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "meta":
            device_type, dtype, enabled = "cpu", torch.bfloat16, False
        original(self, device_type, dtype, enabled, cache_enabled)

    with replaced(torch.autocast, "__init__", init):
        yield


def _any_device(original: Callable[..., None], rules: _Rules) -> Callable[..., None]:
    def init(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type in ("cuda", "meta"):
            rules.install()
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        original(self, device_type, dtype, enabled, cache_enabled)

    return init


def _both(clear: Callable[[], None], rules: _Rules) -> Callable[[], None]:
    def cleared() -> None:
        clear()
        rules.forget()

    return cleared


class MetaScaler(torch.amp.GradScaler):
    """Loss scaling for fp16: a few scalars on the device, gradients unscaled in place (torch/amp/grad_scaler.py)."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._lazy_init_scale_growth_tracker(torch.device("meta"))

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step always: meta tensors have no values that could overflow."""
        return optimizer.step(*args, **kwargs)
