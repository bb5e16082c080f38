"""The options of training, its step and its loop."""
