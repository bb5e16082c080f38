"""All features of a job: layers, extremes, training, static estimate and simulation."""

import math

from vramcast.jobs.analysis.optimizers import OPTIMIZERS
from vramcast.models.example import Example
from vramcast.models.features.layers import ACTIVATIONS, largest_convolution, log_amount, main_activation
from vramcast.models.layer_columns import ConvolutionColumns
from vramcast.virtual_gpu.distributed.parallelism import SHARDED
from vramcast.virtual_gpu.measurement import Measurement, Status
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, parse_call

_COUNTED = (
    "Linear", "Conv2d", "BatchNorm1d", "BatchNorm2d", "LayerNorm", "GroupNorm", "Dropout", "MultiheadAttention",
    "scaled_dot_product_attention", "Embedding", "AdaptiveAvgPool2d", "AvgPool2d", "MaxPool2d", "Softmax", "Sigmoid",
    "add", "cat",
)  # fmt: skip
_LARGEST = 5
_BEYOND = 1.25
"""Reference of a job that does not fit, relative to the room on the device: clearly above it, but correctable."""

Numbers = dict[str, float]


def full_numbers(example: Example) -> Numbers:
    """Return all features: amounts as logarithms, shares and flags unchanged."""
    return {**table_numbers(example), **_simulated_numbers(example, example.simulation)}


def table_numbers(example: Example) -> Numbers:
    """Return the features of a layer table, without a simulation."""
    return {
        **_layer_numbers(example),
        **_extremes(example),
        **_training_numbers(example),
        **_static_numbers(example),
    }


def scheduled_numbers(example: Example) -> Numbers:
    """Return the features of a layer table and of its schedule."""
    peak = example.scheduled
    reserved = max(peak.reserved_bytes, 1)
    layers = example.layers
    return {
        **table_numbers(example),
        "scheduled": log_amount(peak.reserved_bytes),
        "scheduled_allocated": math.log(max(peak.allocated_bytes, 1) / reserved),
        "scheduled_state": peak.state_bytes / reserved,
        "scheduled_kept": peak.kept_bytes / reserved,
        "scheduled_small": peak.small_bytes / reserved,
        "scheduled_trial": math.log(max(peak.trial_bytes, 1) / reserved),
        "scheduled_in_card": reserved / _room_bytes(example),
        "tells_saved": float(any(layer.saved is not None for layer in layers)),
        "tells_inputs": float(any(layer.inputs is not None for layer in layers)),
        "cudnn_benchmark": float(example.training.cudnn_benchmark),
        "adapter": float(example.training.adapter is not None),
        "quantized": float(example.training.quantize is not None),
        "channels_last": float(example.training.channels_last),
    }


def scheduled_need_bytes(example: Example) -> int:
    """Return the reserved memory of the schedule."""
    return example.scheduled.reserved_bytes


def simulated_need_bytes(example: Example) -> int:
    """Return the reserved memory of the simulation.

    For a job that does not fit, return more than the room on the device: the memory reserved when it died would be a
    reference that fits, and every such job would be an exception to learn.
    """
    simulated = example.simulation
    if simulated.status is Status.OK:
        return simulated.reserved_bytes or 0
    return round(_BEYOND * _room_bytes(example))


def _room_bytes(example: Example) -> int:
    """Return the room on the device for the job's allocator."""
    return max(example.capacity_bytes - example.overhead_bytes, 1)


def _layer_numbers(example: Example) -> Numbers:
    layers = example.columns
    counts, activations = layers.counts, sum(layers.activations)
    activation = main_activation(layers)
    return {
        "depth": log_amount(len(layers)),
        "parameters": log_amount(sum(layers.parameters)),
        "activations": log_amount(activations),
        "activations_x_batch": log_amount(activations * example.training.batch_size),
        "input_elements": log_amount(example.input_elements),
        **{f"count_{kind}": log_amount(counts[kind]) for kind in _COUNTED},
        "count_other": log_amount(sum(number for kind, number in counts.items() if kind not in _COUNTED)),
        **{f"activation_{kind}": float(kind == activation) for kind in ACTIVATIONS},
    }


def _extremes(example: Example) -> Numbers:
    """Return the layers that decide peaks: the largest outputs, weights and convolutions, with their shapes."""
    layers, batch = example.columns, example.training.batch_size
    outputs = layers.largest_outputs
    return {
        "largest_output": log_amount(batch * sum(outputs[:1])),
        "largest_outputs": log_amount(batch * sum(outputs[:_LARGEST])),
        "largest_weight": log_amount(max(layers.parameters, default=0)),
        "widest": log_amount(layers.widest),
        **_convolution_numbers(layers.convolutions(example.input_elements), batch),
    }


def _convolution_numbers(convolutions: ConvolutionColumns, batch: int) -> Numbers:
    totals = convolutions.totals(batch)
    if not len(totals):
        return _NO_CONVOLUTION
    largest = int(totals.argmax())
    misaligned = convolutions.channels % 4 != 0
    return {
        "convolution": log_amount(totals[largest]),
        "convolution_weight": log_amount(convolutions.weight[largest]),
        "convolution_channels": log_amount(convolutions.channels[largest]),
        "convolution_size": log_amount(convolutions.size[largest]),
        "convolution_misaligned": float(misaligned[largest]),
        "convolutions_misaligned": int(misaligned.sum()) / len(totals),
        "least_size": log_amount(convolutions.size.min()),
        "most_channels": log_amount(convolutions.channels.max()),
    }


_NO_CONVOLUTION: Numbers = dict.fromkeys(
    (
        "convolution", "convolution_weight", "convolution_channels", "convolution_size", "convolution_misaligned",
        "convolutions_misaligned", "least_size", "most_channels",
    ),
    0.0,
)  # fmt: skip


_SAME_MEMORY = {"AdamW": "Adam"}
"""Optimizers that differ in arithmetic only (torch/optim/adamw.py: a subclass without state or kernels of its own), so
that a job with the other one is not out of distribution."""


def _training_numbers(example: Example) -> Numbers:
    training = example.training
    named, _ = parse_call(training.optimizer)
    optimizer = _SAME_MEMORY.get(named, named)
    last_batch = training.last_batch_size or training.batch_size
    return {
        "batch": log_amount(training.batch_size),
        "last_batch": log_amount(last_batch),
        "last_batch_share": last_batch / training.batch_size,
        "dry_run_batch": log_amount(training.dry_run_batch_size or 0),
        "accumulate": log_amount(training.accumulate),
        "prefetched": log_amount(training.prefetched_batches),
        "world_size": log_amount(training.parallelism.world_size if training.parallelism else 1),
        "sharded": float(training.parallelism is not None and training.parallelism.strategy in SHARDED),
        "checkpointing": float(bool(training.checkpointing)),
        "implementation_fused": float(training.implementation == "fused"),
        "implementation_single": float(training.implementation == "single"),
        "autocast": float(training.autocast is not None),
        "element_bytes": float(DTYPE_BYTES[training.dtype]),
        **{f"optimizer_{name}": float(name == optimizer) for name in OPTIMIZERS},
    }


def _static_numbers(example: Example) -> Numbers:
    static = example.static
    return {
        "static": log_amount(static.total_bytes),
        "static_parameters": log_amount(static.parameter_bytes),
        "static_optimizer": log_amount(static.optimizer_bytes),
        "static_activations": log_amount(static.activation_bytes),
        "state_multiple": static.optimizer_bytes / max(static.parameter_bytes, 1),
        "activation_share": static.activation_bytes / max(static.total_bytes, 1),
    }


def _simulated_numbers(example: Example, simulated: Measurement) -> Numbers:
    requested, allocated = simulated.requested_bytes or 0, simulated.allocated_bytes or 0
    workspace = simulated.breakdown["workspace"]
    reserved_bytes = simulated.reserved_bytes or 0
    reserved = max(reserved_bytes, 1)
    convolution = largest_convolution(example)
    return {
        "simulated_fits": float(simulated.status is Status.OK),
        "simulated_requested": log_amount(requested),
        "simulated_allocated": log_amount(allocated),
        "simulated_reserved": log_amount(reserved_bytes),
        "simulated_workspace": log_amount(workspace),
        "requested_share": requested / reserved,
        "allocated_share": allocated / reserved,
        "workspace_share": workspace / reserved,
        "convolution_share": convolution * DTYPE_BYTES[example.training.dtype] / reserved,
        "static_share": math.log(max(example.static.total_bytes, 1) / reserved),
        "position_in_card": reserved_bytes / _room_bytes(example),
    }
