"""The private names that tests of this package use; everything else is public."""

from phalanx._control_client import send_request
from phalanx._formatting import format_age, format_size
from phalanx.checkpoint._checkpoint_directory import LocalCheckpointDirectory
from phalanx.checkpoint._manifest import Manifest
from phalanx.env import _quotas
from phalanx.groups import _store
from phalanx.launch import _checkpoint_commands, _doctor, _error_reports, _orphan_guard
from phalanx.launch._child_process import ChildProcess, RecordedExit, with_orphans
from phalanx.launch._control_socket import ControlServer
from phalanx.launch._doctor import (
    CHECKS,
    Finding,
    Report,
    format_finding,
    format_summary,
    run_check,
    run_checks,
    self_test,
)
from phalanx.launch._error_reports import ErrorReportFilter
from phalanx.launch._job import default_env, drop_in_env, torchrun_command, torchrun_options
from phalanx.launch._outcome import RankExit, describe
from phalanx.launch._output import MAX_LINE_BYTES, LineSplitter, OutputPump, OutputSource, Screen
from phalanx.launch._restart_policy import ReplaceLost
from phalanx.launch._run_directory import RunInfo, find_run, find_runs, run_directory
from phalanx.launch._script_analysis import analyze_script
from phalanx.launch._spawn import _CallerStream
from phalanx.launch._standby import encode_assignment, standby_command
from phalanx.launch._supervisor import _signals_into as signals_into
from phalanx.launch._worker_channel import ChannelReader, WorkerMessage

__all__ = [
    "CHECKS",
    "MAX_LINE_BYTES",
    "ChannelReader",
    "ChildProcess",
    "ControlServer",
    "ErrorReportFilter",
    "Finding",
    "LineSplitter",
    "LocalCheckpointDirectory",
    "Manifest",
    "OutputPump",
    "OutputSource",
    "RankExit",
    "RecordedExit",
    "ReplaceLost",
    "Report",
    "RunInfo",
    "Screen",
    "WorkerMessage",
    "_CallerStream",
    "_checkpoint_commands",
    "_doctor",
    "_error_reports",
    "_orphan_guard",
    "_quotas",
    "_store",
    "analyze_script",
    "default_env",
    "describe",
    "drop_in_env",
    "encode_assignment",
    "find_run",
    "find_runs",
    "format_age",
    "format_finding",
    "format_size",
    "format_summary",
    "run_check",
    "run_checks",
    "run_directory",
    "self_test",
    "send_request",
    "signals_into",
    "standby_command",
    "torchrun_command",
    "torchrun_options",
    "with_orphans",
]
