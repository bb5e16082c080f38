"""Say, before a training job starts, how much GPU memory it will take."""

__version__ = "0.2.0.dev0"
