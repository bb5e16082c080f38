"""Import this before lightning: torchmetrics fails to import when torchvision's operators do not load."""

from vramcast.jobs.families.libraries import tolerate_broken_torchvision

tolerate_broken_torchvision()
