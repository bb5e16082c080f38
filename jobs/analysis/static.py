"""The static estimate (SGV): the memory of a training step from shapes alone."""

from vramcast.jobs.analysis.optimizers import state_elements
from vramcast.jobs.spec import LayerTable, StaticEstimate
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES, TrainingSetup


def static_estimate(training: TrainingSetup, table: LayerTable) -> StaticEstimate:
    """Add up parameters, gradients, optimizer state, and one batch of inputs and layer outputs.

    Autocast halves the activations; checkpointing is ignored, because shapes do not tell what is recomputed.
    """
    size = DTYPE_BYTES[training.dtype]
    activation_size = DTYPE_BYTES[training.autocast or training.dtype]
    return StaticEstimate(
        parameter_bytes=table.parameters * size,
        gradient_bytes=table.trainable_elements * size,
        optimizer_bytes=state_elements(training, table.trainable_shapes) * size,
        activation_bytes=training.batch_size * (table.input_elements * size + table.activations * activation_size),
    )


def shape_inference_bytes(parameters: int, activations: int, batch_size: int, element_bytes: int = 4) -> int:
    """Return the textbook estimate (Guan, SHARCNET 2020): weights and outputs, each forward and backward.

    `activations` are those of one sample, including the input.
    """
    return 2 * element_bytes * (parameters + batch_size * activations)
