"""Shape inference as beginners are taught it (Guan, SHARCNET 2020): weights and outputs, each forward and backward."""

from vramcast.jobs.analysis.static import shape_inference_bytes
from vramcast.models.baselines._formula import Formula
from vramcast.models.example import Example
from vramcast.virtual_gpu.training.setup import DTYPE_BYTES


class ShapeInference(Formula):
    """Twice the parameters and twice a batch of inputs and layer outputs: no optimizer state, no context."""

    name = "shape_inference"

    def used_bytes(self, example: Example) -> float:
        """Evaluate the slides' formula on the layer table."""
        return shape_inference_bytes(
            sum(layer.parameters for layer in example.layers),
            example.input_elements + sum(layer.activations for layer in example.layers),
            example.training.batch_size,
            DTYPE_BYTES[example.training.dtype],
        )
