"""The exception tree. Every error of this package is a DbPartitionError.

DbPartitionError
 ├─ ConfigurationError            a setting or argument is wrong; names it, its value, what to do
 │   └─ UnknownStepError          no live node (or this worker) has registered the step
 ├─ SchemaError                   the tables are missing or older than this package
 ├─ DatabaseError                 the database refused, or cannot be reached
 ├─ InvalidPartitionError         a partitioner's result cannot be stored
 ├─ NoLiveNodesError              nobody could run the work
 ├─ ClaimLostError                this partition is no longer ours: drop the work, write nothing
 ├─ StepInterruptedError          raised inside a step that is asked to stop
 ├─ UnskippableError              a chunk met an error that may not be skipped, or too many that may
 └─ JobExecutionError             about one job execution
     ├─ JobExecutionNotFoundError
     ├─ JobExecutionRunningError  refused because it is still active
     ├─ JobAlreadyCompleteError   refused because there is nothing left to restart
     ├─ JobAbandonedError         a person said: never restart this
     ├─ OwnershipLostError        a newer try owns the execution
     ├─ LostPartitionsError       partitions that may have run were lost; a person must decide
     ├─ PartitionsFailedError     the execution ended FAILED
     ├─ JobStoppedError           the execution ended STOPPED
     └─ WaitTimeoutError          the execution outlived its deadline
"""

from __future__ import annotations


class DbPartitionError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(DbPartitionError, ValueError):
    """A setting or argument is wrong."""


class UnknownStepError(ConfigurationError):
    """The step is not registered where it is needed."""


class SchemaError(DbPartitionError):
    """The tables are missing, or older than this package."""


class DatabaseError(DbPartitionError):
    """The database refused, or cannot be reached; secrets in its words are masked."""


class InvalidPartitionError(DbPartitionError, ValueError):
    """A partitioner's result cannot be stored."""


class NoLiveNodesError(DbPartitionError):
    """No live node could run the work."""


class ClaimLostError(DbPartitionError):
    """The partition has changed hands: the work is dropped and nothing is written."""


class StepInterruptedError(DbPartitionError):
    """Raised inside a step that has been asked to stop."""


class UnskippableError(DbPartitionError):
    """A chunk met an error that may not be skipped, or more skips than its limit."""


class JobExecutionError(DbPartitionError):
    """Something about one job execution."""


class JobExecutionNotFoundError(JobExecutionError, LookupError):
    """There is no such job execution."""


class JobExecutionRunningError(JobExecutionError):
    """Refused because the execution is still active."""


class JobAlreadyCompleteError(JobExecutionError):
    """Refused because nothing is left to restart."""


class JobAbandonedError(JobExecutionError):
    """A person said: never restart this."""


class OwnershipLostError(JobExecutionError):
    """A newer try owns the execution."""


class LostPartitionsError(JobExecutionError):
    """Partitions that may have run were lost; a person must decide whether they may run again."""


class PartitionsFailedError(JobExecutionError):
    """The execution ended FAILED."""


class JobStoppedError(JobExecutionError):
    """The execution ended STOPPED."""


class WaitTimeoutError(JobExecutionError):
    """The execution outlived the deadline of whoever waits for it."""
