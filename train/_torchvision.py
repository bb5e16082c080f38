"""Imported before lightning: torchmetrics, which it imports, fails on a torchvision whose operators do not load."""

from vramcast.dataset_builder.families.libraries import cope_with_torchvision

cope_with_torchvision()
