"""The process that loads cuDNN, and answers requests for the workspaces of convolutions.

cuDNN 9.8 and later accept a description of a GPU in place of a GPU (CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR), so
execution plans can be made on a machine without one. If cuDNN crashes, it ends this process and no other.
"""

import ctypes
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from vramcast.child.channel import Channel
from vramcast.child.messages import DONE, READY, REFUSED

_ERROR_TEXT_BYTES = 4096


class Kind(IntEnum):
    """Kinds of descriptors (cudnn_graph.h, cudnnBackendDescriptorType_t)."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIG = 3
    HEURISTICS = 4
    PLAN = 5
    FORWARD = 10
    WEIGHT = 11
    DATA = 12
    GRAPH = 15
    TENSOR = 17
    DEVICE = 38


class Attribute(IntEnum):
    """Attributes of descriptors (cudnn_graph.h, cudnnBackendAttributeName_t)."""

    CONVOLUTION_COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATION = 102
    CONVOLUTION_STRIDE = 103
    CONVOLUTION_PADDING_AFTER = 104
    CONVOLUTION_PADDING_BEFORE = 105
    CONVOLUTION_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIG_ENGINE = 300
    PLAN_CONFIG = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    GRAPH_OPERATIONS = 801
    TENSOR_ALIGNMENT = 900
    TENSOR_TYPE = 901
    TENSOR_SHAPE = 902
    TENSOR_STRIDE = 903
    TENSOR_ID = 906
    ENGINE_NOTES = 1303
    DEVICE_JSON = 2702


class Type(IntEnum):
    """Types of attributes (cudnn_graph.h, cudnnBackendAttributeType_t)."""

    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    NOTE = 11
    DESCRIPTOR = 15
    CHAR = 24


_C_TYPES: Mapping[Type, Any] = {
    Type.INT64: ctypes.c_int64, Type.FLOAT: ctypes.c_float, Type.DOUBLE: ctypes.c_double,
    Type.DESCRIPTOR: ctypes.c_void_p, Type.CHAR: ctypes.c_char,
}  # fmt: skip
"""The other types are enumerations."""
_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_CROSS_CORRELATION = 1
_ALIGNMENT_BYTES = 16
_INSTANT, _FALLBACK = 0, 2
"""Modes of the heuristics: torch asks for the first, and for the second if no plan of the first runs."""
_DOWN_CONVERTS = 1
"""Numerical note of engines that round their inputs, which torch leaves out (Conv_v8.cpp, filterEngineConfigs)."""
_MOST_NOTES = 16
_OPERATIONS = {"forward": (Kind.FORWARD, 700), "data": (Kind.DATA, 706), "weight": (Kind.WEIGHT, 712)}
"""Kind of an operation and its first attribute: alpha, beta, the convolution, weight, x and y follow one another."""
_DEVICE = {
    "cudaDeviceId": 0, "deviceName": "GPU", "driverVer": 13000, "pciDeviceId": 0, "isTccDriver": 0,
    "supportCoopLaunch": 1, "warpSize": 32, "multiProcessorCount": 64, "totalGlobalMem": 2**34, "l2CacheSize": 2**22,
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "maxRegistersPerSM": 65536, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 1536, "maxCtasPerSM": 16,
    "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 101376, "reservedSharedMemoryPerBlock": 1024,
    "smClockRateKHz": 1500000, "memClockRateKHz": 7000000, "memoryBusWidth": 256,
}  # fmt: skip
"""Members that a description must have. No value changed a workspace (tests/test_cudnn_library.py)."""
_DRIVER_FUNCTIONS = (
    "cuGetErrorString", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)  # fmt: skip
_STUB_LIBRARY = 34
"""The driver's error code for a library without a driver (CUDA_ERROR_STUB_LIBRARY)."""


class CudnnError(Exception):
    """cuDNN refused a call."""


class NoCompilerError(Exception):
    """A stub of the driver is needed and cannot be compiled."""


class Descriptor:
    """An object of cuDNN's backend interface."""

    def __init__(self, cudnn: ctypes.CDLL, kind: Kind):
        self._cudnn = cudnn
        self._parts: list[Descriptor] = []
        self.pointer = ctypes.c_void_p()
        self._check(cudnn.cudnnBackendCreateDescriptor(kind, ctypes.byref(self.pointer)), f"create {kind.name}")

    def __del__(self) -> None:
        self._cudnn.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, attribute: int, kind: Type, values: Sequence[Any]) -> "Descriptor":
        """Set an attribute."""
        buffer = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*map(_plain, values))
        self._parts += [item for item in values if isinstance(item, Descriptor)]
        count = ctypes.c_int64(len(values))
        self._check(self._cudnn.cudnnBackendSetAttribute(self.pointer, attribute, kind, count, buffer), f"{attribute}")
        return self

    def finalize(self) -> "Descriptor":
        """Check the attributes and make the object usable."""
        self._check(self._cudnn.cudnnBackendFinalize(self.pointer), "finalize")
        return self

    def get(self, attribute: int, kind: Type, most: int = 1) -> list[Any]:
        """Return the values of an attribute, `most` at most."""
        buffer = (_C_TYPES.get(kind, ctypes.c_int) * most)()
        count = self._read(attribute, kind, most, buffer)
        return list(buffer)[:count]

    def get_descriptors(self, attribute: int, kind: Kind, most: int | None = None) -> list["Descriptor"]:
        """Return the descriptors of an attribute, all of them by default."""
        count = self._read(attribute, Type.DESCRIPTOR, 0, None) if most is None else most
        made = [Descriptor(self._cudnn, kind) for _ in range(count)]
        buffer = (ctypes.c_void_p * count)(*map(_plain, made))
        return made[: self._read(attribute, Type.DESCRIPTOR, count, buffer)]

    def _read(self, attribute: int, kind: Type, most: int, buffer: Any) -> int:
        """Fill a buffer with the values of an attribute and return their number."""
        count = ctypes.c_int64()
        arguments = (self.pointer, attribute, kind, ctypes.c_int64(most), ctypes.byref(count), buffer)
        self._check(self._cudnn.cudnnBackendGetAttribute(*arguments), f"{attribute}")
        return count.value

    def _check(self, status: int, what: str) -> None:
        if status:
            text = ctypes.create_string_buffer(_ERROR_TEXT_BYTES)
            self._cudnn.cudnnGetLastErrorString(text, ctypes.c_size_t(_ERROR_TEXT_BYTES))
            raise CudnnError(f"{what}: status {status}: {text.value.decode(errors='replace')}")


def _plain(value: Any) -> Any:
    return value.pointer.value if isinstance(value, Descriptor) else value


class Cudnn:
    """A loaded cuDNN."""

    def __init__(self, library: Path, needed: Sequence[Path]):
        _load_driver()
        for path in needed:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._cudnn = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._cudnn.cudnnGetVersion.restype = ctypes.c_size_t
        self._devices: dict[float, Descriptor] = {}

    @property
    def release(self) -> str:
        """The release, such as 9.8.0."""
        number = self._cudnn.cudnnGetVersion()
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    def workspaces(self, request: Mapping[str, Any]) -> Iterator[int]:
        """Yield the workspaces of the execution plans for a convolution in the order in which torch tries them."""
        device = self._device(request["capability"])
        operation = self._operation(request)
        graph = self._make(Kind.GRAPH, (Attribute.GRAPH_OPERATIONS, Type.DESCRIPTOR, [operation]))
        for mode in (_INSTANT, _FALLBACK):
            for config in self._configs(graph, device, mode):
                with suppress(CudnnError):  # torch tries the next plan, too
                    plan = self._make(
                        Kind.PLAN,
                        (Attribute.PLAN_CONFIG, Type.DESCRIPTOR, [config]),
                        (Attribute.PLAN_DEVICE, Type.DESCRIPTOR, [device]),
                    )
                    yield plan.get(Attribute.PLAN_WORKSPACE, Type.INT64)[0]

    def _make(self, kind: Kind, *attributes: tuple[int, Type, Sequence[Any]]) -> Descriptor:
        made = Descriptor(self._cudnn, kind)
        for attribute in attributes:
            made.set(*attribute)
        return made.finalize()

    def _device(self, capability: float) -> Descriptor:
        """Return the description of a GPU by its compute capability."""
        if capability not in self._devices:
            text = json.dumps({**_DEVICE, "deviceVer": round(capability * 100)}).encode()
            characters = [bytes([item]) for item in text]
            self._devices[capability] = self._make(Kind.DEVICE, (Attribute.DEVICE_JSON, Type.CHAR, characters))
        return self._devices[capability]

    def _operation(self, request: Mapping[str, Any]) -> Descriptor:
        kind, first = _OPERATIONS[request["direction"]]
        # The compute type is float32 for halves, and the factors have the type of the computation.
        is_double = request["dtype"] == "float64"
        factor = Type.DOUBLE if is_double else Type.FLOAT
        dimensions = len(request["x"]) - 2
        convolution = self._make(
            Kind.CONVOLUTION,
            (Attribute.CONVOLUTION_COMPUTE_TYPE, Type.DATA_TYPE, [_DATA_TYPES["float64" if is_double else "float32"]]),
            (Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, [_CROSS_CORRELATION]),
            (Attribute.CONVOLUTION_DIMENSIONS, Type.INT64, [dimensions]),
            (Attribute.CONVOLUTION_PADDING_BEFORE, Type.INT64, request["padding"]),
            (Attribute.CONVOLUTION_PADDING_AFTER, Type.INT64, request["padding"]),
            (Attribute.CONVOLUTION_DILATION, Type.INT64, request["dilation"]),
            (Attribute.CONVOLUTION_STRIDE, Type.INT64, request["stride"]),
        )
        tensors = [self._tensor(number, request, name) for number, name in enumerate(("weight", "x", "y"))]
        return self._make(
            kind,
            (first, factor, [1.0]),
            (first + 1, factor, [0.0]),
            *((first + 2 + place, Type.DESCRIPTOR, [part]) for place, part in enumerate((convolution, *tensors))),
        )

    def _tensor(self, number: int, request: Mapping[str, Any], name: str) -> Descriptor:
        shape = request[name]
        return self._make(
            Kind.TENSOR,
            (Attribute.TENSOR_TYPE, Type.DATA_TYPE, [_DATA_TYPES[request["dtype"]]]),
            (Attribute.TENSOR_SHAPE, Type.INT64, shape),
            (Attribute.TENSOR_STRIDE, Type.INT64, strides(shape, request["channels_last"])),
            (Attribute.TENSOR_ID, Type.INT64, [number]),
            (Attribute.TENSOR_ALIGNMENT, Type.INT64, [_ALIGNMENT_BYTES]),
        )

    def _configs(self, graph: Descriptor, device: Descriptor, mode: int) -> Iterator[Descriptor]:
        """Yield the configurations of engines that the heuristics propose and torch accepts."""
        heuristics = self._make(
            Kind.HEURISTICS,
            (Attribute.HEURISTICS_GRAPH, Type.DESCRIPTOR, [graph]),
            (Attribute.HEURISTICS_MODE, Type.HEURISTICS_MODE, [mode]),
            (Attribute.HEURISTICS_DEVICE, Type.DESCRIPTOR, [device]),
        )
        for config in heuristics.get_descriptors(Attribute.HEURISTICS_RESULTS, Kind.ENGINE_CONFIG):
            engine = config.get_descriptors(Attribute.CONFIG_ENGINE, Kind.ENGINE, most=1)[0]
            if _DOWN_CONVERTS not in engine.get(Attribute.ENGINE_NOTES, Type.NOTE, _MOST_NOTES):
                yield config


def strides(shape: Sequence[int], channels_last: bool) -> list[int]:
    """Return the strides of a dense tensor, in elements."""
    order = [0, *range(2, len(shape)), 1] if channels_last else range(len(shape))
    result, step = [0] * len(shape), 1
    for dimension in reversed(order):
        result[dimension], step = step, step * shape[dimension]
    return result


def _load_driver() -> None:
    """Load the CUDA driver's library, or a stub in its place that answers every call with an error.

    cuDNN's library of runtime-compiled engines is linked to the driver, and cuDNN does not start without it.
    """
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise NoCompilerError("neither the CUDA driver nor a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "stub.c"), Path(folder, "libcuda.so.1")
        source.write_text("".join(f"int {name}(void) {{ return {_STUB_LIBRARY}; }}\n" for name in _DRIVER_FUNCTIONS))
        words = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
        subprocess.run(words, check=True, stdout=sys.stderr)
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def answer(cudnn: Cudnn, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the workspace of the execution plan that torch takes, or the largest one if the request asks for it."""
    try:
        workspaces = cudnn.workspaces(request)
        workspace = max(workspaces, default=None) if request["largest"] else next(workspaces, None)
    except CudnnError as error:
        return {"event": REFUSED, "reason": str(error)}
    return {"event": DONE, "workspace": workspace}


def main(library: Path, needed: Sequence[Path], report_fd: int) -> None:
    """Load cuDNN and answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the parent ends the input if it ends the parent
    channel = Channel(report_fd)
    try:
        cudnn = Cudnn(library, needed)
    except NoCompilerError as error:
        channel.report(REFUSED, reason=str(error), fix="install one of them")
    except (CudnnError, OSError, subprocess.CalledProcessError) as error:
        channel.report(REFUSED, reason=str(error))
    else:
        channel.report(READY, release=cudnn.release)
        channel.serve(lambda request: (answer(cudnn, request), None))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(item) for item in sys.argv[2:-1]], int(sys.argv[-1]))
