"""Storage of rows: an append-only journal, flat views of it, and splits by configuration.

The journal is exported here. `views` and `splits` are imported by name, because views need pandas.
"""

from vramcast.dataset_builder.store.journal import JournalWriter
from vramcast.dataset_builder.store.reader import (
    JOURNAL_NAME,
    Header,
    Journal,
    iter_records,
    locate,
    read_header,
    read_journal,
)
from vramcast.dataset_builder.store.repair import RepairReport, repair

__all__ = [
    "JOURNAL_NAME",
    "Header",
    "Journal",
    "JournalWriter",
    "RepairReport",
    "iter_records",
    "locate",
    "read_header",
    "read_journal",
    "repair",
]
