"""Asks an installed cuDNN which plans it chooses, on a machine without a GPU."""
