"""Jobs: a subject with its inputs, loss and optimizer, and how a target of the command line becomes one."""
