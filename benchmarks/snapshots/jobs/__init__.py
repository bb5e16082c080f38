"""Jobs behind recordings, written anew: scripts for `vramcast snapshot FILE --against -- python JOB`."""
