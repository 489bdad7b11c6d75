"""Records on a node's disk and in its memory: filled by many processes at once, then sealed and only read.

::

    record_store.py   RecordStore: one fingerprint's records; what the rest of datacache uses
    record_files.py   its files: UnsealedStore (records and log), SealedStore (records and index)
    folders.py        its folder: created, entered, described and removed
    records.py        the bytes of one record, with checksums
    files.py, locks.py   private files and atomic writes; locks between processes
"""
