"""Files that describe a network, read as layer tables. Nothing in them is run, unpickled or loaded as weights.

Every reader checks sizes before it works: a file from a stranger costs bounded memory and time, and its faults end in
one sentence.
"""
