"""An installed cuDNN: its execution plans for convolutions, on a machine without a GPU."""
