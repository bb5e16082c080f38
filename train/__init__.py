"""Training of estimators."""

from dataset_builder.families.libraries import cope_with_torchvision

cope_with_torchvision()  # torchmetrics, which lightning imports, would fail on one that does not load
