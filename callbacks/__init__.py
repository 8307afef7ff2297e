"""What a user adds to a run, one file a callback; a file dropped here can be named in a config as callbacks.<Class>."""

from callbacks.completion_logger import CompletionLogger
from callbacks.entropy_guard import EntropyGuard
from callbacks.evaluation_report import EvaluationReport
from callbacks.export_hf import ExportHF
from callbacks.prediction_writer import PredictionWriter
from callbacks.run_summary import RunSummary

__all__ = ["CompletionLogger", "EntropyGuard", "EvaluationReport", "ExportHF", "PredictionWriter", "RunSummary"]
