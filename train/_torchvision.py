"""Imported before lightning: torchmetrics, which it imports, fails on a torchvision whose operators do not load."""

from dataset_builder.families.libraries import cope_with_torchvision

cope_with_torchvision()
