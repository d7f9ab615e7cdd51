"""One error tree. `str(error)` is the single line that a person reads.

    SloscopeError              the world is wrong: field, value, what is accepted
    ├── ContractError          an SLO contract or a limit that does not parse
    ├── RecordError            a journal record that breaks the schema
    ├── JournalError           a directory or file of the journal that cannot be used
    │   └── UnwritableError    one that cannot be written: the disk is full, read-only, or somebody else's
    ├── TraceError             a workload trace that cannot be replayed
    ├── QueryError             an unknown question, parameter or window
    ├── CompareError           two results made under different contracts
    ├── ConfigError            a command-line option, an address, an occupied port
    ├── ModelFileError         weights or a tokenizer that cannot be loaded
    └── DashboardError         a panel or rule that does not match the catalogue

Our own bugs are asserts, not members of this tree.
"""


class SloscopeError(Exception):
    """Base of everything a user can cause. The command line prints it and exits with 2."""


class ContractError(SloscopeError):
    pass


class RecordError(SloscopeError):
    pass


class JournalError(SloscopeError):
    pass


class UnwritableError(JournalError):
    pass


class TraceError(SloscopeError):
    pass


class QueryError(SloscopeError):
    pass


class CompareError(SloscopeError):
    pass


class ConfigError(SloscopeError):
    pass


class ModelFileError(SloscopeError):
    pass


class DashboardError(SloscopeError):
    pass
