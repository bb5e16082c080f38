"""Operators whose output's shape depends on data: true where the data is known, a stated assumption where not."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vramcast.virtual_gpu.cuda.devices import META, is_meta
from vramcast.virtual_gpu.cuda.operators import aten, map_tensors
from vramcast.virtual_gpu.operators.embedding import MASKS, put
from vramcast.virtual_gpu.tracing.trace import ASSUMED_SELECTIONS

if TYPE_CHECKING:
    from vramcast.virtual_gpu.cuda.script_tracer import ScriptTracer

_READING = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
_INDEXING = _READING | {aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
DYNAMIC = frozenset({
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.repeat_interleave.Tensor, aten.bincount.default, *_INDEXING,
})  # fmt: skip


class DynamicShapes:
    """Runs operators whose shapes depend on data, on the device of a tracer."""

    def __init__(self, tracer: "ScriptTracer", fraction: float) -> None:
        self._tracer = tracer
        self._fraction = fraction

    def run(self, func: Any, args: Any, kwargs: Any, values: Any) -> Any:
        """Run an operator; `values` are its results on the host where all of its inputs are known."""
        if func in _INDEXING:
            return self._index(func, args, kwargs, values)
        if values is None:
            values = self._assumed(func, args, kwargs)
            return map_tensors(self._new, values)
        out = map_tensors(self._new, values)
        self._tracer.values.keep_all(out, values)
        return out

    def _new(self, value: Tensor) -> Tensor:
        return self._tracer.see(torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META))

    def _index(self, func: Any, args: Any, kwargs: Any, values: Any) -> Any:
        """Index by places: a mask becomes the places that it selects, as on CUDA (IndexingUtils.h, expandTensors)."""
        if func not in _READING and _is_masked_fill(args):
            return self._plain(func, (*args[:1], [None] * 0, *args[2:]), kwargs, values, filled=True)
        indices = [place for index in args[1] for place in self._places(index)]
        return self._plain(func, (args[0], indices, *args[2:]), kwargs, values, filled=False)

    def _plain(self, func: Any, args: Any, kwargs: Any, values: Any, *, filled: bool) -> Any:
        tracer = self._tracer
        in_place = func in (aten.index_put_.default, aten._index_put_impl_.default)
        if filled:
            out = args[0] if in_place else tracer.see(torch.empty_like(args[0]))
        elif func not in _READING:
            out = put(tracer, args, kwargs, in_place=in_place)
        else:
            out = tracer._traced(func, (), args, kwargs)
        if values is not None:
            tracer.values.keep_all(out, values)
        return out

    def _places(self, index: Tensor | None) -> list[Tensor | None]:
        if index is None:
            return [None]
        if index.dtype not in MASKS:
            return [index if is_meta(index) else self._new(index)]
        mask = self._tracer.values.of(index) if is_meta(index) else index
        if mask is None:
            mask = self._assumed_mask(index)
        places = mask.nonzero()
        new = self._new(places)
        self._tracer.values.keep_all(new, places)
        return list(new.unbind(1))

    def _assumed_mask(self, like: Tensor) -> Tensor:
        """Return a mask of which the assumed part is set, evenly spread."""
        count = like.numel()
        if self._tracer.ends_no_sequence():
            return torch.zeros(like.shape, dtype=torch.bool)
        chosen = math.ceil(self._fraction * count)
        self._tracer.assumptions.note(f"a mask with unknown values selects {self._share()} of its places")
        if self._fraction < 1:  # all places are a bound, a part of them is a guess
            self._tracer.trace.approximations.add(ASSUMED_SELECTIONS)
        mask = torch.zeros(count, dtype=torch.bool)
        if chosen:
            mask[torch.linspace(0, count - 1, chosen).round().long()] = True
        return mask.view(like.shape)

    def _share(self) -> str:
        return "all" if self._fraction == 1 else f"{self._fraction:.0%}"

    def _assumed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return results on the host for stand-ins of the unknown inputs."""
        if func in (aten.nonzero.default, aten.masked_select.default):
            tensor = args[-1] if func is aten.masked_select.default else args[0]
            mask = self._assumed_mask(tensor)
            if func is aten.nonzero.default:
                return mask.nonzero()
            return torch.empty(int(mask.sum()), dtype=args[0].dtype)
        self._tracer.assumptions.note(f"{func} on unknown values: its output is as large as it can be")
        if func is aten.repeat_interleave.Tensor:
            size = kwargs.get("output_size") or args[0].numel()
            return torch.zeros(size, dtype=args[0].dtype)
        if func is aten.bincount.default:
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return torch.zeros(max(least, 1), dtype=torch.int64)
        distinct = torch.arange(args[0].numel()).view(args[0].shape).to(args[0].dtype)
        if func is aten._unique2.default:  # its dtype may not have as many values as there are places
            return distinct.flatten(), *(torch.empty(n, dtype=torch.int64) for n in _unique_sizes(args, kwargs))
        return func(distinct, *args[1:], **kwargs)


def _unique_sizes(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the shapes of the inverse indices and the counts that _unique2 returns."""
    inverse = args[2] if len(args) > 2 else kwargs.get("return_inverse", False)
    counts = args[3] if len(args) > 3 else kwargs.get("return_counts", False)
    return args[0].shape if inverse else (0,), (args[0].numel(),) if counts else (0,)


def _is_masked_fill(args: Any) -> bool:
    """Return True where CUDA fills in place of indexing (TensorAdvancedIndexing.cpp, _index_put_impl_)."""
    indices, value = args[1], args[2]
    masks = [index for index in indices if index is not None]
    return len(masks) == 1 and masks[0].dtype in MASKS and value.numel() == 1
