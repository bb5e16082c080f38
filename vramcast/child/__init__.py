"""Child processes: the one protocol for a user's code, scripts, measurements, workers and cuDNN.

A parent starts a `process.Child` and sends requests to its standard input. The child opens a `channel.Channel`, and
reports on a pipe of its own. `messages` holds the format of both directions. Only the standard library is imported,
because a child may run in a user's interpreter.
"""
