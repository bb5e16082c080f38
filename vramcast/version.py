"""The version of vramcast, in a module without imports, so that every layer may read it."""

__version__ = "0.2.0.dev0"
