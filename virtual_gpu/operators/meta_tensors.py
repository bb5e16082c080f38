"""Tell tensors without data from others, whatever their Python attributes say."""

from collections.abc import Callable

import torch
from torch import Tensor

_is_meta: Callable[[Tensor], bool] = vars(torch._C.TensorBase)["is_meta"].__get__
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""Returns how many function modes are active, such as `with torch.device(...)`."""


def is_meta(tensor: Tensor) -> bool:
    """Return True for a tensor without data.

    `Tensor.is_meta` says otherwise for tensors on a virtual GPU (virtual_gpu/cuda), and a function mode would ask it.
    """
    if function_modes():
        with torch._C.DisableTorchFunction():
            return _is_meta(tensor)
    return _is_meta(tensor)
